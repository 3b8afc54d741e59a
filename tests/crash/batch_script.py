"""A batch script that is killed and started again; run by the test beside it."""

from __future__ import annotations

import sys

from headgate_sync import Headgate

hg = Headgate.from_env()


@hg.task("double", queue="q")
def double(n: int) -> int:
    return n * 2


def main(count: int) -> None:
    with hg.batch("nightly", chunk_size=50) as batch:
        for n in range(count):
            batch.enqueue(double, n=n)
    with hg.worker(queues=["q"], threads=4):
        for item in batch.as_completed(timeout="2m"):
            print(item.index, item.completion.value, flush=True)
    hg.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
