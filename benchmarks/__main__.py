"""`python -m benchmarks NAME [options] [--json]`."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks.database import benchmark_database
from benchmarks.report import versions_and_settings

NAMES = (
    "enqueue",
    "drain",
    "latency",
    "admit",
    "gate",
    "memory",
    "idle",
    "recover",
    "inspect",
    "dashboards",
    "soak",
    "peers",
)


def main() -> int:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    benchmarks = parser.add_subparsers(dest="name", required=True)
    for name in NAMES:
        try:
            module = importlib.import_module(f"benchmarks.{name}")
        except ModuleNotFoundError as error:
            if str(error.name).startswith(("benchmarks", "headgate_sync", "tests")):
                raise
            benchmarks.add_parser(name, help="needs the extra `bench`, not installed")
            continue
        options = benchmarks.add_parser(name, help=module.__doc__)
        options.add_argument("--runs", type=int, default=3)
        options.add_argument("--url", help="default: a server of its own")
        options.add_argument(
            "--json", action="store_true", help="last line of stdout is one object"
        )
        module.add_options(options)
        options.set_defaults(run=module.run)
    arguments = parser.parse_args()
    with benchmark_database(arguments.url) as url:
        report = arguments.run(url, arguments)
        print(report.text())
        if arguments.json:
            print(report.json(*versions_and_settings(url)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
