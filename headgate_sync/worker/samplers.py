"""How much memory this process uses, by three measures."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def rss_high_water() -> int:
    """Bytes of memory that this process has held at most; children not included.

    It never falls, so a peak is noticed whenever it was.
    """
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_now() -> int:
    """Bytes of memory that this process holds now; Linux only."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cgroup_current() -> int:
    """Bytes that the control group of this process uses, children and cache included.

    Linux with the unified hierarchy only, as in containers.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, _, group = line.split(":", 2)
        if number == "0":
            root = Path("/sys/fs/cgroup")
            # Inside a container the group's own folder is mounted as the root.
            own = root / group.lstrip("/") / "memory.current"
            return int((own if own.exists() else root / "memory.current").read_text())
    raise OSError("no unified control group")
