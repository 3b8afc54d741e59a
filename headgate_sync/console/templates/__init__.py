"""Pages as jinja2 templates."""
