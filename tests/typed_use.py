"""What a type checker sees of an application; read by mypy, never run.

Each `type: ignore` is an error that must be found: an unused one fails the check.
"""

from __future__ import annotations

from typing import Any, assert_type

from headgate_sync import Completion, Headgate, JobContext
from headgate_sync.request import JobRequest
from headgate_sync.task import FunctionTask

hg = Headgate()


@hg.task("resize", queue="images", retention="1d")
def resize(ctx: JobContext, image_id: int, width: int = 640) -> str:
    return f"/resized/{image_id}-{width}.jpg"


@hg.task("count")
def count() -> int:
    return resize(None, 1).count("/")


@hg.task("wrong", max_attempts="3")  # type: ignore[arg-type]
def wrong() -> None: ...


@hg.task("unknown", retries=3)  # type: ignore[call-arg]
def unknown() -> None: ...


def produce(session: Any) -> None:
    # The context is the worker's; what is left is checked by `job`. `enqueue` takes
    # `tx=` beside the payload, which no signature can say; it checks when it is called.
    assert_type(resize.job(8, width=320), JobRequest)
    resize.job("8")  # type: ignore[arg-type]
    resize.job(8, height=3)  # type: ignore[call-arg]
    resize.using(delay="1m").job(image_id=8)
    resize.using(delai="1m")  # type: ignore[call-arg]
    resize.enqueue(8, tx=session)
    hg.enqueue(resize.job(8), tx=session)


def wait() -> None:
    done = resize.enqueue_and_wait(8, timeout="30s")
    assert_type(done, Completion[str])
    assert_type(done.value, str | None)
    assert_type(
        count.using(priority=1).enqueue_and_wait(timeout="1s").unwrap(), int | None
    )
    assert_type(hg.enqueue_and_wait(count.job(), timeout="1s"), Completion[Any])


assert_type(count, FunctionTask[[], int])
