"""Reads the parameters of a handler: those of the payload, and the injected ones."""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from types import FrameType, FunctionType
from typing import Any

from attrs import frozen

from headgate_sync.errors import InvalidRequest
from headgate_sync.forms import form_of
from headgate_sync.injection import Injector, injector_of
from headgate_sync.scalars import Form, UnknownAnnotation

# The modules whose frames may stand between a declaration and the code that declares.
_DECLARING = {
    f"headgate_sync.{name}"
    for name in ("app", "handlers", "parameters", "registry", "task")
}


@frozen(kw_only=True)
class Parameters:
    """The parameters of one handler.

    Attributes:
        payload: forms of what the producer sends; empty without `payload_types`.
        annotations: of the parameters that are not injected.
        injected: names of what the worker fills in, from left to right.
        defaults: of payload parameters.
        signature: of the payload parameters alone, for binding a producer's arguments.
        result: form of the return value.
        declares_result: annotated to return something else than None.
    """

    payload: Mapping[str, Form]
    annotations: Mapping[str, object]
    injected: Mapping[str, Injector]
    defaults: Mapping[str, object]
    signature: inspect.Signature
    result: Form
    declares_result: bool


class LateNames(Exception):
    """An annotation uses a name that does not exist yet; the text is the name."""


def declaring_frame() -> FrameType | None:
    """The frame of the code that declares a task, past the frames of the registry."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _DECLARING:
        frame = frame.f_back
    return frame


def check_function(label: str, function: object) -> FunctionType:
    """Refuse what cannot be a handler, before any annotation is looked at.

    Raises:
        InvalidRequest: no plain function, or one whose parameters cannot be named by a
            payload.
    """
    if not isinstance(function, FunctionType):
        raise InvalidRequest(
            f"{label}: a handler is a function, got {type(function).__name__}"
        )
    for test, what in (
        (inspect.iscoroutinefunction, "async def"),
        (inspect.isasyncgenfunction, "an async generator"),
        (inspect.isgeneratorfunction, "a generator"),
    ):
        if test(function):
            raise InvalidRequest(f"{label}: a handler is a plain function, not {what}")
    parameters = inspect.signature(function).parameters
    owner = function.__qualname__.rpartition(".")[0]
    if "self" in parameters and owner and not owner.endswith("<locals>"):
        raise InvalidRequest(f"{label}: a handler is a function, not a method")
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InvalidRequest(
                f"{label}: {parameter} cannot be carried, name each parameter"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InvalidRequest(f"{label}: {parameter.name} is positional-only")
    return function


def read_parameters(
    label: str,
    function: FunctionType,
    frame: FrameType | None,
    *,
    payload_types: bool = True,
    result_type: bool = True,
) -> Parameters:
    """Split the parameters of a handler and compile the forms of its payload.

    Args:
        label: the task, for error texts.
        function: passed `check_function`.
        frame: where it is declared; late annotations may use its local names.
        payload_types: give each payload parameter a form; where the payload is one
            instance of a class there is none.
        result_type: give the return value a form; a batch handler returns outcomes.

    Raises:
        LateNames: an annotation cannot be evaluated yet.
        InvalidRequest: a parameter that nothing can carry; the text names it.
    """
    scope = {} if frame is None else dict(frame.f_locals)
    hints = _hints(label, function, scope)
    signature = inspect.signature(function)
    payload: dict[str, Form] = {}
    annotations: dict[str, object] = {}
    injected: dict[str, Injector] = {}
    for name, parameter in signature.parameters.items():
        annotation = hints.get(name, parameter.empty)
        fill = _injector(f"{label}: {name}", annotation, scope)
        if fill is None:
            annotations[name] = annotation
            if payload_types:
                if name == "tx":
                    raise InvalidRequest(
                        f"{label}: tx is reserved for the caller's transaction"
                    )
                payload[name] = _form(f"{label}: {name}", annotation, scope)
        else:
            if (
                parameter.default is not parameter.empty
                and parameter.default is not None
            ):
                raise InvalidRequest(
                    f"{label}: {name} is filled by the worker, its default must be None"
                )
            injected[name] = fill
    carried = [p for p in signature.parameters.values() if p.name in annotations]
    returned = hints.get("return") if result_type else inspect.Parameter.empty
    if "return" not in hints:
        returned = inspect.Parameter.empty
    if returned == bytes | None:
        returned = bytes  # None stores nothing, and bytes are stored as they are
    return Parameters(
        payload=payload,
        annotations=annotations,
        injected=injected,
        defaults={p.name: p.default for p in carried if p.default is not p.empty},
        signature=signature.replace(parameters=carried),
        result=_form(f"{label}: result", returned, scope),
        declares_result=returned not in (inspect.Parameter.empty, type(None), Any),
    )


def _injector(
    where: str, annotation: object, scope: Mapping[str, object]
) -> Injector | None:
    try:
        return injector_of(where, annotation, scope)
    except NameError as error:
        raise LateNames(error.name or str(error)) from error


def _form(where: str, annotation: object, scope: Mapping[str, object]) -> Form:
    try:
        return form_of(annotation, scope)
    except UnknownAnnotation as fault:
        raise InvalidRequest(f"{where}: {fault}") from fault
    except NameError as error:
        raise LateNames(error.name or str(error)) from error


def _hints(
    label: str, function: Callable[..., Any], scope: Mapping[str, object]
) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, localns=dict(scope), include_extras=True)
    except NameError as error:
        name = error.name or str(error)
        if _only_for_type_checkers(function, name):
            raise InvalidRequest(
                f"{label}: {name} is imported under TYPE_CHECKING only; "
                "import it at run time, the handler's parameters need it"
            ) from error
        raise LateNames(name) from error
    except Exception as error:
        raise InvalidRequest(f"{label}: annotations: {error}") from error


def _only_for_type_checkers(function: Callable[..., Any], name: str) -> bool:
    """Whether the function's module imports the name inside `if TYPE_CHECKING:`."""
    try:
        module = sys.modules[function.__module__]
        tree = ast.parse(inspect.getsource(module))
    except (KeyError, OSError, TypeError, SyntaxError):
        return False  # no source at hand: the name is simply not there
    return any(
        (alias.asname or alias.name.partition(".")[0]) == name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(ast.Module(node.body, []))
        if isinstance(inner, ast.Import | ast.ImportFrom)
        for alias in inner.names
    )
