"""The command line: `python -m headgate_sync`, also installed as `headgate`."""

from __future__ import annotations

import errno
import io
import sys

_NEEDED = ("click", "rich")
# What a write says when there is no room, or when the disk fails.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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
    if sys.stdout is None:  # it was started with a closed one
        sys.stdout = io.StringIO()
    try:
        headgate.main(argv, prog_name="headgate")
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        print(f"headgate: {error}", file=sys.stderr)
        sys.stdout = sys.stderr  # nobody tries to write the rest at the exit
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
