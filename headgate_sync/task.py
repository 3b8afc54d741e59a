"""Tasks: a kind with its payload, its options and its upcasters.

A function task carries the function's own parameters; a class task carries one instance
of an attrs class or dataclass. Both turn what a producer has into bytes, strictly, and
read the bytes back with the same code, so that what an enqueue accepts can be decoded.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack
from weakref import WeakKeyDictionary

import attrs
from attrs import frozen

from headgate_sync.codec import JSON, Codec, check_codec
from headgate_sync.envelope import MAX_INT32, check_int, check_kind
from headgate_sync.errors import (
    ConfigurationError,
    InvalidRequest,
    MalformedPayload,
    UnknownSchemaVersion,
)
from headgate_sync.forms import form_of
from headgate_sync.handlers import Handler
from headgate_sync.options import (
    NO_DEFAULTS,
    NO_OPTIONS,
    UNSET,
    CallKeywords,
    CallOptions,
    TaskOptions,
    make_options,
    option_names,
    unique_of,
)
from headgate_sync.parameters import LateNames, check_function, declaring_frame
from headgate_sync.request import JobHandle, JobRequest, Producer
from headgate_sync.scalars import Form, Mismatch, UnknownAnnotation
from headgate_sync.templates import parse_template

if TYPE_CHECKING:
    from headgate_sync.client.waiting import Completion

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


class Task:
    """A kind with its aliases and options; by itself one whose payload stays bytes."""

    def __init__(
        self,
        kind: str,
        *,
        version: int = 1,
        aliases: Sequence[str] = (),
        options: TaskOptions = NO_DEFAULTS,
    ) -> None:
        check_kind(kind)
        if isinstance(aliases, str):
            raise InvalidRequest(
                f"task {kind}: aliases must be a sequence, got one text"
            )
        for alias in aliases:
            check_kind(alias)
        self.kind = kind
        self.label = f"task {kind}"
        self.version = check_int(f"{self.label}: version", version, 1, MAX_INT32)
        self.aliases = tuple(aliases)
        self.options = options

    def settle(self) -> None:
        """Evaluate annotations that were late, and check what depends on them.

        Raises:
            InvalidRequest: a name is still missing, or a template uses an unknown one.
        """


class PayloadTask(Task, ABC):
    """What function tasks and class tasks share."""

    def __init__(self, kind: str, *, codec: Codec, **declared: Any) -> None:
        super().__init__(kind, **declared)
        check_codec(f"{self.label}: codec", codec)
        self.codec = codec
        self._upcasters: dict[int, Callable[[bytes], Any]] = {}
        self._settled = False

    def add_upcaster(self, from_version: int, upcast: Callable[[bytes], Any]) -> None:
        """Let stored payloads of one other version be read.

        Raises:
            InvalidRequest: the present version, or one that has an upcaster.
        """
        check_int(f"{self.label}: from_version", from_version, 1, MAX_INT32)
        if from_version == self.version:
            raise InvalidRequest(f"{self.label}: {from_version} is the present version")
        if from_version in self._upcasters:
            raise InvalidRequest(
                f"{self.label}: version {from_version} has an upcaster already"
            )
        self._upcasters[from_version] = upcast

    def decode(self, version: int, data: bytes) -> Any:
        """Read stored bytes: an instance, or arguments by name.

        Raises:
            UnknownSchemaVersion: no upcaster from the stored version.
            Mismatch, CodecError: the bytes are none of that version; an upcaster may
                raise anything.
        """
        if version == self.version:
            return self._read(self.codec.decode(data))
        upcast = self._upcasters.get(version)
        if upcast is None:
            raise UnknownSchemaVersion(
                version,
                f"{self.label}: no upcaster from version {version} to {self.version}",
            )
        return self._check_upcast(upcast(data))

    def _request(
        self, value: Any, encode: Callable[[Any], Any], options: CallOptions
    ) -> JobRequest:
        """Encode a payload and prove that the worker's code can read it."""
        try:
            plain = encode(value)
            data = self.codec.encode(plain)
            self._read(self.codec.decode(data))
        except (Mismatch, MalformedPayload) as fault:
            raise InvalidRequest(f"{self.label}: {fault}") from fault
        except InvalidRequest as error:
            raise InvalidRequest(f"{self.label}: {error.message}") from error
        except RecursionError:
            raise InvalidRequest(f"{self.label}: nested too deeply") from None
        return JobRequest(
            task=self, value=value, plain=plain, data=data, options=options
        )

    def settle(self) -> None:
        """See `Task.settle`."""
        if self._settled:
            return
        try:
            self._evaluate()
        except LateNames as late:
            raise InvalidRequest(
                f"{self.label}: the annotations use {late}, which is not defined"
            ) from late
        self._check_names_in(self.options)
        self._settled = True

    def _settle_if_possible(self) -> None:
        try:
            self._evaluate()
        except LateNames:
            return  # names may come later; first use and `Registry.check` look again
        self.settle()

    def check_templates(self, options: CallOptions) -> None:
        """Check that the names in the templates of a call are names of the payload.

        Raises:
            InvalidRequest: the text names task, option and name.
        """
        self.settle()
        self._check_names_in(options)

    def _check_names_in(self, options: TaskOptions | CallOptions) -> None:
        unique = unique_of(options.unique)
        texts = {
            "partition": options.partition,
            "rate_class": options.rate_class,
            "unique": None if unique is None else unique.key,
        }
        parts = self.parts()
        for option, text in texts.items():
            if isinstance(text, str):
                for path in parse_template(text).paths:
                    self._check_path(option, path, parts)

    def _check_path(
        self, option: str, path: tuple[str, ...], parts: Mapping[str, Form]
    ) -> None:
        known: Mapping[str, Form] | None = parts
        for name in path:
            if known is None:
                return  # a plain value: only the payload itself knows its names
            if name not in known:
                raise InvalidRequest(
                    f"{self.label}: {option}: {{{'.'.join(path)}}} names no payload "
                    f"value; known are {', '.join(sorted(known)) or 'none'}"
                )
            known = known[name].parts

    # What the two kinds do differently.

    @abstractmethod
    def parts(self) -> Mapping[str, Form]:
        """The forms of the payload's values, by name."""

    @abstractmethod
    def with_defaults(self, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        """The plain payload with the values that the handler would fill in."""

    @abstractmethod
    def apply(self, function: Callable[..., Any], value: Any) -> Any:
        """Call an option's callable with the payload."""

    @abstractmethod
    def _evaluate(self) -> None:
        """Evaluate the annotations; raises `LateNames`."""

    @abstractmethod
    def _read(self, plain: Any) -> Any:
        """Turn a decoded payload into values; raises `Mismatch`."""

    @abstractmethod
    def _check_upcast(self, value: Any) -> Any:
        """Check what an upcaster returned; raises `Mismatch`."""


class FunctionTask(PayloadTask, Generic[P, R]):
    """A function whose parameters are the payload; calling it calls the function.

    Made by `Headgate.task` or `Registry.task`.
    """

    def __init__(self, function: Callable[..., R], kind: str, **declared: Any) -> None:
        options = declared.pop("options")
        handler_options = declared.pop("handler_options")
        checked = check_function(f"task {kind}", function)
        functools.update_wrapper(self, checked)
        super().__init__(kind, options=options, **declared)
        retry = None if options.retry is UNSET else options.retry
        self.fn = function
        self.handler = Handler(
            self.label,
            function,
            retry=retry,
            version=self.version,
            **handler_options,
        )
        self.producers: list[Callable[[], Producer]] = []
        self._settle_if_possible()

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Call the plain function; nothing is enqueued."""
        return self.fn(*args, **kwargs)

    def __reduce__(self) -> str:
        return str(self.__qualname__)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<{self.label}: {self.handler.name}>"

    def job(self, *args: P.args, **kwargs: P.kwargs) -> JobRequest:
        """A job with these arguments, validated and not sent.

        Raises:
            InvalidRequest: an argument is missing, unknown or of another type.
        """
        return self.request(args, kwargs, NO_OPTIONS)

    def enqueue(self, *args: Any, tx: Any = None, **kwargs: Any) -> JobHandle:
        """Enqueue a job with these arguments; see `Client.enqueue` for the errors.

        Args:
            *args: bound to the handler's payload parameters.
            tx: the caller's transaction, which decides whether the job exists.
            **kwargs: payload, all of them; options go through `using`.
        """
        request = self.request(args, kwargs, NO_OPTIONS)
        return self.producer().enqueue(request, tx=tx)

    def enqueue_or_join(self, *args: Any, tx: Any = None, **kwargs: Any) -> JobHandle:
        """`enqueue`, or the handle of the job that holds the unique key."""
        request = self.request(args, kwargs, NO_OPTIONS)
        return self.producer().enqueue_or_join(request, tx=tx)

    def enqueue_and_wait(
        self, *args: Any, timeout: timedelta | str, **kwargs: Any
    ) -> Completion[R]:
        """Enqueue a job with these arguments and wait for its end.

        See `Client.enqueue_and_wait` for the errors.

        Args:
            *args: bound to the handler's payload parameters.
            timeout: from the call; reserved here, so that a payload parameter of this
                name must be given by position.
            **kwargs: payload, all of them.
        """
        return _waited(self, NO_OPTIONS, args, kwargs, timeout)

    def using(self, **options: Unpack[CallKeywords]) -> BoundTask[P, R]:
        """The task with options for the next call: those of `CallOptions`.

        Raises:
            InvalidRequest: an unknown option or a bad value.
        """
        made = make_options(CallOptions, self.label, options)
        self.check_templates(made)
        return BoundTask(self, made)

    def request(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions
    ) -> JobRequest:
        """Bind arguments to names and encode them."""
        self.settle()
        signature = self.handler.parameters().signature
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            meant = [
                name
                for name in kwargs
                if name not in signature.parameters
                and name in option_names(CallOptions)
            ]
            hint = f"; options go through using({meant[0]}=...)" if meant else ""
            raise InvalidRequest(f"{self.label}: {error}{hint}") from None
        return self._request(bound.arguments, self._encode, options)

    def producer(self) -> Producer:
        """Where this task enqueues.

        Raises:
            ConfigurationError: its registry belongs to no facade, or to several.
        """
        if len(self.producers) == 1:
            return self.producers[0]()
        if self.producers:
            raise ConfigurationError(
                f"{self.label} belongs to {len(self.producers)} facades; "
                "enqueue it through one of them: hg.enqueue(task, ...)"
            )
        raise ConfigurationError(
            f"{self.label} belongs to no facade; include its registry in a Headgate, "
            "or hand task.job(...) to a Client"
        )

    def parts(self) -> Mapping[str, Form]:
        """See `PayloadTask.parts`."""
        return self.handler.parameters().payload

    def with_defaults(self, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `PayloadTask.with_defaults`."""
        defaults = self.handler.parameters().defaults
        missing = {name: defaults[name] for name in defaults if name not in plain}
        try:
            return {**plain, **self._encode(missing)} if missing else plain
        except Mismatch as mismatch:
            raise InvalidRequest(f"{self.label}: default of {mismatch}") from mismatch

    def apply(self, function: Callable[..., Any], value: Any) -> Any:
        """See `PayloadTask.apply`."""
        return function(**{**self.handler.parameters().defaults, **value})

    def _evaluate(self) -> None:
        self.handler.parameters()

    def _encode(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        forms = self.handler.parameters().payload
        return _by_name(lambda name, value: forms[name].encode(value), arguments)

    def _read(self, plain: Any) -> dict[str, Any]:
        if type(plain) is not dict:
            raise Mismatch("expected an object of arguments")
        self._check_names(plain)
        forms = self.handler.parameters().payload
        return _by_name(lambda name, value: forms[name].decode(value), plain)

    def _check_names(self, arguments: Mapping[str, Any]) -> None:
        parameters = self.handler.parameters()
        for name in arguments:
            if name not in parameters.payload:
                raise Mismatch(f"unknown argument {name!r}")
        for name in parameters.payload:
            if name not in arguments and name not in parameters.defaults:
                raise Mismatch("missing").inside(f".{name}")

    def _check_upcast(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise Mismatch("the upcaster did not return a dict of arguments")
        self._check_names(value)
        self._encode(value)  # only to see that every value is what the handler expects
        return value


def _by_name(
    convert: Callable[[str, Any], Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    made = {}
    for name, value in values.items():
        try:
            made[name] = convert(name, value)
        except Mismatch as mismatch:
            raise mismatch.inside(f".{name}") from None
    return made


@frozen
class BoundTask(Generic[P, R]):
    """A function task with the options of the next call."""

    task: FunctionTask[P, R]
    options: CallOptions

    def job(self, *args: P.args, **kwargs: P.kwargs) -> JobRequest:
        """See `FunctionTask.job`."""
        return self.task.request(args, kwargs, self.options)

    def enqueue(self, *args: Any, tx: Any = None, **kwargs: Any) -> JobHandle:
        """See `FunctionTask.enqueue`."""
        request = self.task.request(args, kwargs, self.options)
        return self.task.producer().enqueue(request, tx=tx)

    def enqueue_or_join(self, *args: Any, tx: Any = None, **kwargs: Any) -> JobHandle:
        """See `FunctionTask.enqueue_or_join`."""
        request = self.task.request(args, kwargs, self.options)
        return self.task.producer().enqueue_or_join(request, tx=tx)

    def enqueue_and_wait(
        self, *args: Any, timeout: timedelta | str, **kwargs: Any
    ) -> Completion[R]:
        """See `FunctionTask.enqueue_and_wait`."""
        return _waited(self.task, self.options, args, kwargs, timeout)


def _waited(
    task: FunctionTask[Any, R],
    options: CallOptions,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    timeout: timedelta | str,
) -> Completion[R]:
    if "tx" in kwargs:
        raise InvalidRequest(
            f"{task.label}: enqueue_and_wait takes no tx: "
            "nobody can run the job before the commit"
        )
    request = task.request(args, kwargs, options)
    return task.producer().enqueue_and_wait(request, timeout=timeout)


class ClassTask(PayloadTask):
    """An attrs class or dataclass whose instances are the payload."""

    def __init__(self, payload_class: type, kind: str, **declared: Any) -> None:
        super().__init__(kind, **declared)
        if not (attrs.has(payload_class) or dataclasses.is_dataclass(payload_class)):
            raise InvalidRequest(
                f"{self.label}: {payload_class.__name__} is neither an attrs class "
                "nor a dataclass"
            )
        self.payload_class = payload_class
        self._frame: FrameType | None = declaring_frame()
        self._form: Form | None = None
        self._settle_if_possible()

    def __repr__(self) -> str:
        return f"<{self.label}: {self.payload_class.__qualname__}>"

    def request(self, instance: Any, options: CallOptions) -> JobRequest:
        """Encode an instance of the payload class."""
        self.settle()
        return self._request(instance, self._compile().encode, options)

    def parts(self) -> Mapping[str, Form]:
        """See `PayloadTask.parts`."""
        return self._compile().parts or {}

    def with_defaults(self, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `PayloadTask.with_defaults`; an instance has every value."""
        return plain

    def apply(self, function: Callable[..., Any], value: Any) -> Any:
        """See `PayloadTask.apply`."""
        return function(value)

    def _evaluate(self) -> None:
        self._compile()

    def _compile(self) -> Form:
        if self._form is None:
            scope = {} if self._frame is None else dict(self._frame.f_locals)
            try:
                self._form = form_of(self.payload_class, scope)
            except UnknownAnnotation as fault:
                raise InvalidRequest(f"{self.label}: {fault}") from fault
            except NameError as error:
                raise LateNames(error.name or str(error)) from error
            self._frame = None
        return self._form

    def _read(self, plain: Any) -> Any:
        return self._compile().decode(plain)

    def _check_upcast(self, value: Any) -> Any:
        if not isinstance(value, self.payload_class):
            raise Mismatch(
                f"the upcaster returned {type(value).__name__}, "
                f"expected {self.payload_class.__name__}"
            )
        return value


# The task of a payload class, kept beside the class and found by the class alone: a
# subclass is no task by itself.
_class_tasks: WeakKeyDictionary[type, ClassTask] = WeakKeyDictionary()


def task_of(payload_class: type) -> ClassTask | None:
    """The task that a payload class was declared as, or None."""
    return _class_tasks.get(payload_class)


def declare_class(payload_class: type, kind: str, **declared: Any) -> ClassTask:
    """Make a payload class a task.

    Raises:
        InvalidRequest: the class is a task already, or cannot be one.
    """
    known = _class_tasks.get(payload_class)
    if known is not None:
        raise InvalidRequest(
            f"task {kind}: {payload_class.__name__} is task {known.kind} already"
        )
    return ClassTask(payload_class, kind, **declared)


def keep_class(made: ClassTask) -> None:
    """Remember a declared class; the last step of a declaration that found no fault."""
    _class_tasks[made.payload_class] = made


def task(
    kind: str,
    *,
    version: int = 1,
    aliases: Sequence[str] = (),
    codec: Codec = JSON,
    **options: Any,
) -> Callable[[C], C]:
    """Declare a payload class without a registry, for programs that only enqueue.

    Args:
        kind: name under which the jobs are stored.
        version: of the payload's shape.
        aliases: further kinds that its handler answers.
        codec: turns plain values into bytes.
        **options: those of `TaskOptions`.

    Raises:
        InvalidRequest: a bad kind, version, option or class.
    """

    def decorate(payload_class: C) -> C:
        if not inspect.isclass(payload_class):
            raise InvalidRequest(
                f"task {kind}: a function needs a registry or a Headgate to live in"
            )
        made = make_options(TaskOptions, f"task {kind}", options)
        keep_class(
            declare_class(
                payload_class,
                kind,
                version=version,
                aliases=aliases,
                codec=codec,
                options=made,
            )
        )
        return payload_class

    return decorate


def upcaster(task: type | Task, from_version: int) -> Callable[[F], F]:
    """Declare how stored bytes of another version become the present payload.

    The function gets the stored bytes and returns an instance of the payload class, or
    the arguments of the function as a dict. It runs at every attempt; the row stays.

    Raises:
        InvalidRequest: no task, or the version has an upcaster.
    """
    target = task_of(task) if isinstance(task, type) else task
    if not isinstance(target, PayloadTask):
        raise InvalidRequest(f"{task!r} is no task with a payload")

    def decorate(function: F) -> F:
        target.add_upcaster(from_version, function)
        return function

    return decorate
