"""The command line: `python -m headgate_sync`, also installed as `headgate`."""

from __future__ import annotations

import sys

_NEEDED = ("click", "rich")


def main(argv: list[str] | None = None) -> int:
    """Run one command; ends the process with its exit code."""
    try:
        import rich  # noqa: F401

        from headgate_sync.cli.main import headgate
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        print(
            f"headgate: the command line needs {error.name}: "
            "pip install 'headgate_sync[cli]'",
            file=sys.stderr,
        )
        return 2
    headgate.main(argv, prog_name="headgate")
    return 0


if __name__ == "__main__":
    sys.exit(main())
