"""A worker process: `python -m headgate_sync.worker module:attribute`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from tenacity import (
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_delay,
    wait_exponential,
)

from headgate_sync.app import Headgate
from headgate_sync.durations import duration_ms
from headgate_sync.envelope import check_int
from headgate_sync.errors import (
    ConfigurationError,
    HeadgateError,
    InvalidRequest,
    may_pass,
)
from headgate_sync.lease import MAX_CAPACITY, MAX_LEASE_MS
from headgate_sync.loggers import OneLine, guarded
from headgate_sync.registry import Registry
from headgate_sync.task import FunctionTask
from headgate_sync.validation import check_name
from headgate_sync.worker.config import WorkerConfig, check_worker_id
from headgate_sync.worker.shutdown import (
    EXIT_ABANDONED,
    EXIT_CONFIGURATION,
    RELEASE_WINDOW_MS,
)
from headgate_sync.worker.worker import Worker

logger = guarded("headgate_sync.worker")

LEVELS = ("debug", "info", "warning", "error", "critical")
FLUSH_S = 1.0
EXIT_INTERRUPTED = 130
# Service threads that wait for a database that is away are waited for in turn.
JOINS_MS = 4_000
LOOK_S = 1.0
LATE_S = 5.0


class AppFailed(Exception):
    """The application's own code raised; its traceback says more than a line could."""


class _Parser(argparse.ArgumentParser):
    """Says what was wrong without repeating how all would be right."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            EXIT_CONFIGURATION,
            f"headgate worker: {message}\nTry '{self.prog} --help' for help.\n",
        )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = _Parser(
        prog="python -m headgate_sync.worker",
        description="Run the jobs of an application until SIGTERM or SIGINT.",
        epilog=(
            "exit codes: 0 drained, 2 set up wrongly, 10 running jobs were handed "
            "back, 11 handlers did not stop, 12 the memory limit was reached, "
            "13 a service thread could not be revived"
        ),
    )
    made.add_argument(
        "app",
        metavar="APP",
        help="module:attribute of a Headgate, a Registry, or a function that makes one",
    )
    # None is what the application configured for its workers, else the default.
    usual = WorkerConfig()
    made.add_argument("--queues", help="default: every queue of a declared task")
    made.add_argument(
        "--threads", type=int, metavar="N", help=f"jobs at once ({usual.capacity})"
    )
    made.add_argument(
        "--prefetch",
        type=int,
        metavar="N",
        help=f"jobs claimed ahead of free threads ({usual.prefetch})",
    )
    made.add_argument("--worker-id", help="stable identity, for sticky jobs")
    made.add_argument("--lease", metavar="DURATION", help=f"of a claim ({usual.lease})")
    made.add_argument(
        "--shutdown-timeout",
        metavar="DURATION",
        help=f"for running jobs after a stop ({usual.shutdown_timeout})",
    )
    made.add_argument(
        "--no-duties", action="store_true", help="leave the upkeep to other workers"
    )
    made.add_argument(
        "--ready-file",
        metavar="PATH",
        help="written with every beat while jobs are taken; for probes",
    )
    made.add_argument(
        "--connect-timeout",
        default="10s",
        metavar="DURATION",
        help="how long to wait for the database at the start (10s)",
    )
    made.add_argument("--log-level", choices=LEVELS, default="info")
    return made


def load_app(name: str) -> Headgate:
    """Import the application.

    Raises:
        ConfigurationError: there is no such module or attribute, or it is none of what
            a worker can run.
        AppFailed: the application's code raised.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigurationError(f"APP is {name!r}, expected module:attribute")
    found: Any = _import(module_name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigurationError(
                f"module {module_name} has no attribute {attribute}"
            ) from None
    if _is_factory(found):
        try:
            found = found()
        except ConfigurationError:
            raise
        except Exception as error:
            raise AppFailed(f"{name}() failed") from error
    if isinstance(found, Registry):
        facade = Headgate.from_env()
        facade.include(found)
        return facade
    if not isinstance(found, Headgate):
        raise ConfigurationError(
            f"{name} is a {type(found).__name__}, expected a Headgate, a Registry, "
            "or a function without arguments that returns one"
        )
    return found


def _is_factory(found: object) -> bool:
    """Whether it can be called for an application: a class and a task cannot."""
    if not callable(found) or isinstance(found, Registry | FunctionTask | type):
        return False
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError):
        return False
    return True


def _import(module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that the application imports in vain is the application's own fault.
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigurationError(f"no module named {error.name}") from None
        raise AppFailed(f"importing {module_name} failed") from error
    except ConfigurationError:
        raise
    except Exception as error:
        raise AppFailed(f"importing {module_name} failed") from error


def make_worker(facade: Headgate, arguments: argparse.Namespace) -> Worker:
    """Make the worker once the database answers.

    Raises:
        HeadgateError: the command line, the set-up or the database is at fault.
    """
    queues = None
    if arguments.queues is not None:
        queues = [part.strip() for part in arguments.queues.split(",") if part.strip()]
    patience_ms = _check_options(arguments, queues)
    until_s = time.monotonic() + patience_ms / 1000
    connected = Retrying(
        retry=retry_if_exception(may_pass),
        wait=wait_exponential(multiplier=0.1, max=1),
        stop=stop_after_delay(patience_ms / 1000),
        sleep=sleep_using_event(threading.Event()),
        reraise=True,
    )

    def ask() -> None:
        facade._runtime.ask(max(1, int((until_s - time.monotonic()) * 1000)))
        if not arguments.no_duties:
            # Nobody holds it: a role without a worker's rights is refused at once here,
            # instead of again and again later.
            facade.store.release_duty("rights", "nobody")

    connected(ask)
    names = ("prefetch", "worker_id", "lease", "shutdown_timeout", "ready_file")
    given = {name: getattr(arguments, name) for name in names}
    config = {name: value for name, value in given.items() if value is not None}
    if arguments.no_duties:
        config["run_duties"] = False
    return facade.worker(queues=queues, threads=arguments.threads, **config)


def _check_options(arguments: argparse.Namespace, queues: list[str] | None) -> int:
    """Check what was typed, under the names that were typed.

    Returns:
        How long to wait for the database, in milliseconds.

    Raises:
        InvalidRequest: out of range; the text names the option.
    """
    if queues is not None:
        if not queues:
            raise InvalidRequest("--queues must name at least one queue")
        for queue in queues:
            check_name("--queues", queue)
    if arguments.threads is not None:
        check_int("--threads", arguments.threads, 1, MAX_CAPACITY)
    if arguments.prefetch is not None:
        most = MAX_CAPACITY - (arguments.threads or 1)
        check_int("--prefetch", arguments.prefetch, 0, most)
    if arguments.worker_id is not None:
        check_worker_id("--worker-id", arguments.worker_id)
    if arguments.lease is not None:
        lease_ms = duration_ms("--lease", arguments.lease)
        if lease_ms > MAX_LEASE_MS:
            raise InvalidRequest(
                f"--lease is {arguments.lease!r}, the limit is {MAX_LEASE_MS} ms"
            )
    if arguments.shutdown_timeout is not None:
        duration_ms("--shutdown-timeout", arguments.shutdown_timeout, minimum_ms=0)
    return duration_ms("--connect-timeout", arguments.connect_timeout)


def main(argv: list[str] | None = None) -> int:
    """Run a worker until it is stopped; returns the exit code.

    With handlers that did not return this ends the process instead.
    """
    arguments = parser().parse_args(argv)
    here = str(Path.cwd())
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    try:
        facade = load_app(arguments.app)
        _log_to_stderr(arguments.log_level)
        worker = make_worker(facade, arguments)
        logger.info(
            "a stop takes up to %d s; a platform that kills earlier turns running jobs "
            "into crashes",
            longest_stop_s(worker.config),
        )
        threading.Thread(
            target=_end_when_late, args=(worker,), name="headgate-late", daemon=True
        ).start()
        status = worker.run()
    except AppFailed as failed:
        traceback.print_exception(failed.__cause__)
        return EXIT_CONFIGURATION
    except HeadgateError as error:
        print(f"headgate worker: {error}".partition("\n")[0], file=sys.stderr)
        return EXIT_CONFIGURATION
    except KeyboardInterrupt:  # while it was waiting for the database
        return EXIT_INTERRUPTED
    if status.abandoned:
        _end_now(status.code)
    facade.close()
    return status.code


def _log_to_stderr(level: str) -> None:
    """Log there, unless the application has said where its log goes."""
    if not logging.getLogger().handlers:
        told = logging.StreamHandler()
        told.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=level.upper(), handlers=[told])


def longest_stop_s(config: WorkerConfig) -> int:
    """Seconds that a stop may take: drain, last grace, handing back, ending threads."""
    drain_ms = config.shutdown_timeout_ms
    total_ms = drain_ms + config.cancel_grace_ms + min(drain_ms, RELEASE_WINDOW_MS)
    total_ms += JOINS_MS
    return -(-total_ms // 1000)


def _end_when_late(worker: Worker) -> None:
    """End the process where a stop takes longer than any may.

    Something holds the main thread then that it could not foresee: a log line waits for
    a pipe that nobody reads, or for a lock of the logging module that a handler keeps.
    """
    while not worker.ends_soon:
        time.sleep(LOOK_S)  # a signal handler may set no event that somebody waits on
    time.sleep(longest_stop_s(worker.config) + LATE_S)
    _end_now(EXIT_ABANDONED)


def _end_now(code: int) -> None:
    """End the process although handlers still run.

    A thread inside a C call can crash an interpreter that is torn down around it, so it
    is not torn down. What is written so far is flushed first, for a moment only: such a
    handler may hold a lock of the logging module.
    """
    flush = threading.Thread(target=_flush, name="headgate-flush", daemon=True)
    flush.start()
    flush.join(FLUSH_S)
    os._exit(code)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for handler in logging.getLogger().handlers:
        handler.flush()


if __name__ == "__main__":
    sys.exit(main())
