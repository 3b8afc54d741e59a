"""Forms of annotations: containers, classes and alternatives, over those of scalars.

Classes go through functions that cattrs generates; every field of them goes through the
forms here, which convert nothing on the quiet.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import threading
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union

import attrs

from headgate_sync.scalars import (
    ANY,
    FLOAT,
    INT,
    LIST,
    OBJECT,
    SHAPES,
    SIMPLE,
    Form,
    Mismatch,
    UnknownAnnotation,
    enum_form,
    exactly,
    expected_other,
    literal_form,
    scalar,
)

if TYPE_CHECKING:
    from cattrs import Converter
    from cattrs.errors import ClassValidationError

_forms: dict[Any, Form] = {}
_lock = threading.RLock()  # guards _forms; compiling nests


def form_of(annotation: object, scope: Mapping[str, object] | None = None) -> Form:
    """The form of an annotation whose names are resolved.

    Args:
        annotation: a type as `typing.get_type_hints` returns it.
        scope: further names for the late annotations of classes inside it.

    Raises:
        UnknownAnnotation: nothing here can carry such values.
        NameError: a class inside has an annotation whose name does not exist yet.
    """
    annotation = _bare(annotation)
    try:
        if annotation in SIMPLE:
            return SIMPLE[annotation]
    except TypeError:
        raise _unknown(annotation) from None
    with _lock:
        form = _forms.get(annotation)
        if form is None:
            # Entered before it is filled, so that a class may contain itself.
            form = _forms[annotation] = Form(
                expected=_text(annotation),
                encode=_unfinished,
                decode=_unfinished,
                shapes=frozenset({OBJECT}),
            )
            try:
                made = _compile(annotation, scope or {})
            except BaseException:
                del _forms[annotation]
                raise
            for field in attrs.fields(Form):
                setattr(form, field.name, getattr(made, field.name))
        return form


def _unfinished(value: Any) -> NoReturn:
    raise AssertionError("a form is used while it is compiled")


def _bare(annotation: Any) -> Any:
    """Take off what says nothing about the form: Annotated, NewType, aliases, Final."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is typing.Annotated:
            annotation = annotation.__origin__
        elif origin in (typing.Final, typing.Required, typing.NotRequired):
            (annotation,) = typing.get_args(annotation)
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            return type(None) if annotation is None else annotation


def _unknown(annotation: object) -> UnknownAnnotation:
    return UnknownAnnotation(
        f"no form for {_text(annotation)}: a payload carries what JSON has, instants, "
        "UUID, Decimal, enumerations, attrs classes and dataclasses; of a model its id"
    )


def _compile(annotation: Any, scope: Mapping[str, object]) -> Form:
    origin = typing.get_origin(annotation) or annotation
    arguments = typing.get_args(annotation)
    if origin is Literal:
        return literal_form(arguments)
    if origin in (Union, types.UnionType):
        return _union(annotation, [form_of(member, scope) for member in arguments])
    if origin in (list, set, frozenset):
        item = form_of(arguments[0] if arguments else Any, scope)
        return _listed(origin, item)
    if origin is tuple:
        return _tuple(annotation, arguments, scope)
    if origin is dict:
        if arguments and _bare(arguments[0]) is not str:
            raise UnknownAnnotation(f"{_text(annotation)}: keys must be str")
        return _mapping(form_of(arguments[1] if arguments else Any, scope))
    if inspect.isclass(annotation):
        if issubclass(annotation, enum.Enum):
            return enum_form(annotation)
        if typing.is_typeddict(annotation):
            return _typed_dict(annotation, scope)
        if attrs.has(annotation) or dataclasses.is_dataclass(annotation):
            return _structure(annotation, scope)
    raise _unknown(annotation)


def _text(annotation: object) -> str:
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)


# Containers.


def _each(convert: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    made = []
    for index, item in enumerate(items):
        try:
            made.append(convert(item))
        except Mismatch as mismatch:
            raise mismatch.inside(f"[{index}]") from None
    return made


def _listed(kind: type, item: Form) -> Form:
    ordered = kind is list
    check = exactly(kind)

    def encode(value: Any) -> list[Any]:
        made = _each(item.encode, check(value))
        # Sets have no order of their own; equal ones must have equal bytes.
        return made if ordered else sorted(made, key=_sort_key)

    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise expected_other(kind.__name__, value)
        made = _each(item.decode, value)
        try:
            return made if ordered else kind(made)
        except TypeError:
            raise Mismatch(f"expected {kind.__name__} of hashable values") from None

    return scalar(kind.__name__, LIST, encode, decode)


def _sort_key(plain: object) -> str:
    return json.dumps(plain, sort_keys=True)


def _tuple(
    annotation: object, arguments: tuple[Any, ...], scope: Mapping[str, object]
) -> Form:
    if not arguments and annotation != tuple[()]:
        arguments = (Any, ...)  # bare
    if len(arguments) == 2 and arguments[1] is ...:
        item = form_of(arguments[0], scope)
        check = exactly(tuple)
        return scalar(
            "tuple",
            LIST,
            lambda value: _each(item.encode, check(value)),
            lambda value: tuple(_each(item.decode, _a_list("tuple", value))),
        )
    forms = [form_of(argument, scope) for argument in arguments]
    expected = f"tuple of {len(forms)}"

    def convert(name: str, values: Any) -> list[Any]:
        if len(values) != len(forms):
            raise Mismatch(f"expected {expected}, got {len(values)}")
        pairs = zip(forms, values, strict=True)
        return _each(lambda pair: getattr(pair[0], name)(pair[1]), pairs)

    return scalar(
        expected,
        LIST,
        lambda value: convert("encode", exactly(tuple)(value)),
        lambda value: tuple(convert("decode", _a_list(expected, value))),
    )


def _a_list(expected: str, value: Any) -> list[Any]:
    if type(value) is not list:
        raise expected_other(expected, value)
    return value


def _mapping(item: Form) -> Form:
    def convert(one: Callable[[Any], Any], value: Any) -> dict[str, Any]:
        made = {}
        for key, entry in exactly(dict)(value).items():
            if not isinstance(key, str):
                raise Mismatch(f"expected dict keys of str, got {type(key).__name__}")
            try:
                made[SIMPLE[str].encode(key)] = one(entry)
            except Mismatch as mismatch:
                raise mismatch.inside(f"[{key!r}]") from None
        return made

    return scalar(
        "dict",
        OBJECT,
        lambda value: convert(item.encode, value),
        lambda value: convert(item.decode, value),
    )


# Named fields.


def _typed_dict(kind: Any, scope: Mapping[str, object]) -> Form:
    hints = typing.get_type_hints(kind, localns=dict(scope), include_extras=True)
    required = set(kind.__required_keys__)
    for name, hint in hints.items():
        # The class reads these marks only where the annotations are not postponed.
        if typing.get_origin(hint) is typing.NotRequired:
            required.discard(name)
        elif typing.get_origin(hint) is typing.Required:
            required.add(name)
    parts = {name: form_of(hint, scope) for name, hint in hints.items()}

    def convert(name: str, value: Any) -> dict[str, Any]:
        made = {}
        for key, entry in exactly(dict)(value).items():
            part = parts.get(key)
            if part is None:
                raise Mismatch(f"unknown key {key!r}")
            try:
                made[key] = getattr(part, name)(entry)
            except Mismatch as mismatch:
                raise mismatch.inside(f".{key}") from None
        missing = required - made.keys()
        if missing:
            raise Mismatch("missing").inside(f".{min(missing)}")
        return made

    return Form(
        expected=kind.__name__,
        encode=lambda value: convert("encode", value),
        decode=lambda value: convert("decode", value),
        shapes=frozenset({OBJECT}),
        parts=parts,
        required=frozenset(required),
    )


def _structure(kind: type[Any], scope: Mapping[str, object]) -> Form:
    """An attrs class or a dataclass."""
    _resolve_types(kind, scope)
    fields: tuple[Any, ...] = (
        attrs.fields(kind) if attrs.has(kind) else dataclasses.fields(kind)
    )
    carried = [field for field in fields if field.init]
    parts = {
        field.name: form_of(Any if field.type is None else field.type, scope)
        for field in carried
    }
    structure = _structure_function(kind)

    def encode(value: Any) -> dict[str, Any]:
        # A subclass would lose its own fields on the way.
        if type(value) is not kind:
            raise expected_other(kind.__name__, value)
        made = {}
        for name, part in parts.items():
            try:
                made[name] = part.encode(getattr(value, name))
            except Mismatch as mismatch:
                raise mismatch.inside(f".{name}") from None
        return made

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise expected_other(kind.__name__, value)
        return structure(value)

    return Form(
        expected=kind.__name__,
        encode=encode,
        decode=decode,
        shapes=frozenset({OBJECT}),
        parts=parts,
        required=frozenset(field.name for field in carried if not _has_default(field)),
    )


def _structure_function(kind: type[Any]) -> Callable[[dict[str, Any]], Any]:
    """Let cattrs generate what calls the constructor with decoded fields."""
    # Most programs carry scalars only and need not load it.
    from cattrs.errors import ClassValidationError
    from cattrs.gen import make_dict_structure_fn

    generated = make_dict_structure_fn(
        kind,
        _converter(),
        _cattrs_forbid_extra_keys=True,
        _cattrs_detailed_validation=True,
    )

    def structure(value: dict[str, Any]) -> Any:
        try:
            return generated(value, kind)
        except ClassValidationError as error:
            raise _mismatch(error) from error

    return structure


@cache
def _converter() -> Converter:
    """A cattrs converter that asks for forms instead of hooks of its own."""
    import cattrs

    class Forms(cattrs.Converter):
        def get_structure_hook(self, type: Any, cache_result: bool = True) -> Any:
            form = form_of(type)
            return lambda value, _: form.decode(value)

    return Forms()


def _resolve_types(kind: type[Any], scope: Mapping[str, object]) -> None:
    """Evaluate postponed annotations of fields, also by the declaring frame's names."""
    if attrs.has(kind):
        attrs.resolve_types(kind, localns=dict(scope))
        return
    hints = typing.get_type_hints(kind, localns=dict(scope), include_extras=True)
    for field in dataclasses.fields(kind):
        field.type = hints[field.name]


def _has_default(field: Any) -> bool:
    if isinstance(field, attrs.Attribute):
        return field.default is not attrs.NOTHING
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _mismatch(error: ClassValidationError) -> Mismatch:
    """The first fault that cattrs found, in our words."""
    noted, others = error.group_exceptions()
    for fault, note in noted:
        found = Mismatch("missing") if isinstance(fault, KeyError) else fault
        if not isinstance(found, Mismatch):
            found = Mismatch(type(found).__name__)
        return found.inside(f".{note.name}")
    unknown = getattr(others[0], "extra_fields", None)
    if unknown:
        return Mismatch(f"unknown field {min(unknown)!r}")
    name = type(others[0]).__name__
    return Mismatch(f"{name} in the constructor of {error.cl.__name__}")


# Alternatives.


def _union(annotation: object, members: list[Form]) -> Form:
    if any(member.encode is ANY.encode for member in members):
        return ANY
    for index, one in enumerate(members):
        for other in members[:index]:
            if not _told_apart(one, other):
                raise UnknownAnnotation(
                    f"{_text(annotation)}: {other.expected} and {one.expected} "
                    "cannot be told apart"
                )
    # An int is a float to the form of float, so int is asked first.
    members = sorted(members, key=lambda member: member.shapes == {FLOAT})
    expected = " or ".join(member.expected for member in members)

    def convert(name: str, value: Any, candidates: list[Form]) -> Any:
        mismatches = []
        for member in candidates:
            try:
                return getattr(member, name)(value)
            except Mismatch as mismatch:
                mismatches.append(mismatch)
        # The one alternative of the value's own type knows best what is wrong.
        telling = [m for m in mismatches if m.path or not m.only_type]
        if len(telling) == 1:
            raise telling[0]
        raise expected_other(expected, value)

    by_shape = {
        shape: [member for member in members if shape in _readable(member)]
        for shape in SHAPES.values()
    }

    def decode(value: Any) -> Any:
        shape = SHAPES.get(type(value))
        return convert("decode", value, [] if shape is None else by_shape[shape])

    return Form(
        expected=expected,
        encode=lambda value: convert("encode", value, members),
        decode=decode,
        shapes=frozenset().union(*(member.shapes for member in members)),
    )


def _readable(form: Form) -> frozenset[int]:
    return form.shapes | {INT} if form.shapes == {FLOAT} else form.shapes


def _told_apart(one: Form, other: Form) -> bool:
    """Whether no encoded value of one could be read as the other."""
    shared = _readable(one) & _readable(other)
    if not shared:
        return True
    if {one.expected, other.expected} == {"int", "float"}:
        return True
    if one.choices is not None and other.choices is not None:
        return not set(one.choices) & set(other.choices)
    if one.parts is None or other.parts is None or shared != {OBJECT}:
        return False
    if one.required - other.parts.keys() or other.required - one.parts.keys():
        return True
    return any(
        one.parts[name].choices is not None
        and other.parts[name].choices is not None
        and _told_apart(one.parts[name], other.parts[name])
        for name in one.required & other.required
    )
