"""Programs that show the queue at work on real input."""
