"""What goes in and out as JSON, as data: read, written and documented from one list."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import field, frozen

from headgate_sync.api.answers import HttpError
from headgate_sync.envelope import MAX_INT64

_WHOLE = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@frozen
class Kind:
    """A type of JSON: how it is documented, and which Python values are of it.

    Attributes:
        schema: for the OpenAPI document.
        accepts: whether a value that was read from JSON is of this type.
        read: makes the value that handlers see.
    """

    schema: Mapping[str, Any]
    accepts: Callable[[Any], bool]
    read: Callable[[str, Any], Any] = lambda name, value: value


def _is_int(value: object) -> bool:
    return type(value) is int and -MAX_INT64 <= value <= MAX_INT64


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_pairs(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())


def _base64(name: str, value: str) -> bytes:
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (UnicodeError, binascii.Error):
        raise HttpError(400, f"{name} must be base64") from None


TEXT = Kind({"type": "string"}, lambda value: isinstance(value, str))
INTEGER = Kind({"type": "integer", "format": "int64"}, _is_int)
BOOLEAN = Kind({"type": "boolean"}, lambda value: isinstance(value, bool))
TEXTS = Kind({"type": "array", "items": {"type": "string"}}, _is_texts)
PAIRS = Kind({"type": "object", "additionalProperties": {"type": "string"}}, _is_pairs)
BASE64 = Kind(
    {"type": "string", "format": "byte"}, lambda value: isinstance(value, str), _base64
)


@frozen
class Given:
    """A field of a body or a parameter of a query.

    Attributes:
        default: when it is absent; None is "not given".
        nullable: null may be sent, and means something.
        meaning: for the documentation.
        limits: further words of the schema, such as `maximum`.
    """

    name: str
    kind: Kind = TEXT
    required: bool = field(default=False, kw_only=True)
    default: Any = field(default=None, kw_only=True)
    nullable: bool = field(default=False, kw_only=True)
    meaning: str = field(default="", kw_only=True)
    limits: Mapping[str, Any] = field(factory=dict, kw_only=True)

    def schema(self) -> dict[str, Any]:
        """What may be sent, for the OpenAPI document."""
        made: dict[str, Any] = {**self.kind.schema, **self.limits}
        if self.nullable:
            made["type"] = [made["type"], "null"]
        if self.default is not None:
            made["default"] = self.default
        if self.meaning:
            made["description"] = self.meaning
        return made


def object_kind(*fields: Given, strict: bool = False) -> Kind:
    """An object with fields of its own, such as a selector.

    Args:
        *fields: those that are known.
        strict: an unknown one is refused.
    """
    known = {one.name for one in fields}

    def read(name: str, value: dict[str, Any]) -> dict[str, Any]:
        for other in value:
            if strict and other not in known:
                raise HttpError(422, f"unknown field `{other}` in `{name}`")
        return read_body(value, fields)

    schema = {
        "type": "object",
        "properties": {one.name: one.schema() for one in fields},
        "additionalProperties": not strict,
        **_required(fields),
    }
    return Kind(schema, lambda value: isinstance(value, dict), read)


def list_kind(item: Kind) -> Kind:
    """A list of values of one type."""

    def accepts(value: object) -> bool:
        return isinstance(value, list) and all(map(item.accepts, value))

    def read(name: str, value: list[Any]) -> list[Any]:
        return [item.read(name, one) for one in value]

    return Kind({"type": "array", "items": dict(item.schema)}, accepts, read)


def _required(fields: Iterable[Given]) -> dict[str, Any]:
    names = [one.name for one in fields if one.required]
    return {"required": names} if names else {}


def read_body(given: Mapping[str, Any], fields: Iterable[Given]) -> dict[str, Any]:
    """The known fields of a JSON object; others are ignored.

    Raises:
        HttpError: 422 for a field that is missing or of another type.
    """
    found: dict[str, Any] = {}
    for one in fields:
        if one.name not in given:
            if one.required:
                raise HttpError(422, f"missing field `{one.name}`")
            found[one.name] = one.default
            continue
        value = given[one.name]
        if value is None and (one.nullable or not one.required):
            found[one.name] = one.default
        elif one.kind.accepts(value):
            found[one.name] = one.kind.read(one.name, value)
        else:
            wanted = one.kind.schema["type"]
            raise HttpError(
                422, f"invalid request body: `{one.name}` must be of type {wanted}"
            )
    return found


def read_query(given: Mapping[str, str], fields: Iterable[Given]) -> dict[str, Any]:
    """The parameters of a query.

    Raises:
        HttpError: 400 for one that is unknown, missing or of another type. Without a
            filter that was misspelt a list would show everything.
    """
    fields = tuple(fields)
    known = [one.name for one in fields]
    for name in given:
        if name not in known:
            allowed = f"allowed: {', '.join(known)}" if known else "none is allowed"
            raise HttpError(400, f"unknown query parameter `{name}`, {allowed}")
    found: dict[str, Any] = {}
    for one in fields:
        text = given.get(one.name)
        if text is None:
            if one.required:
                raise HttpError(400, f"missing query parameter `{one.name}`")
            found[one.name] = one.default
        elif one.kind is INTEGER:
            if not _WHOLE.fullmatch(text) or not _is_int(int(text)):
                raise HttpError(400, f"invalid query parameter `{one.name}`")
            found[one.name] = int(text)
        elif one.kind is BOOLEAN:
            if text not in _BOOLEANS:
                raise HttpError(400, f"invalid query parameter `{one.name}`")
            found[one.name] = _BOOLEANS[text]
        else:
            found[one.name] = text
    return found


# Out.


@frozen
class Out:
    """A type of what is answered: its schema, and how a value is written."""

    schema: Mapping[str, Any]
    write: Callable[[Any], Any] = lambda value: value


def _b64(value: bytes) -> str:
    return base64.b64encode(value).decode()


OUT_TEXT = Out({"type": "string"})
OUT_INTEGER = Out({"type": "integer", "format": "int64"})
OUT_NUMBER = Out({"type": "number"})
OUT_BOOLEAN = Out({"type": "boolean"})
OUT_BYTES = Out({"type": "string", "format": "byte"}, _b64)
OUT_PAIRS = Out(
    {"type": "object", "additionalProperties": {"type": "string"}},
    lambda pairs: {**pairs},
)

OUT_COUNTS = Out(
    {"type": "object", "additionalProperties": {"type": "integer"}},
    lambda pairs: {**pairs},
)


def optional(out: Out) -> Out:
    """The same, or null."""
    schema: dict[str, Any] = (
        {"anyOf": [dict(out.schema), {"type": "null"}]}
        if "$ref" in out.schema
        else {**out.schema, "type": [out.schema["type"], "null"]}
    )
    return Out(schema, lambda value: None if value is None else out.write(value))


def either(*outs: Out) -> Out:
    """One of several objects; for the documentation alone."""
    return Out({"anyOf": [dict(out.schema) for out in outs]})


def listed(out: Out) -> Out:
    """A list of them."""
    return Out(
        {"type": "array", "items": dict(out.schema)},
        lambda values: [out.write(value) for value in values],
    )


SHAPES: dict[str, dict[str, Any]] = {}


def shape(
    title: str,
    /,
    **fields: Out | tuple[Out, str | Callable[[Any], Any]],
) -> Out:
    """An object that is answered, under a name in the OpenAPI document.

    Args:
        title: of the schema.
        **fields: the type; read from the attribute of the same name, or beside it the
            name of another attribute or what finds the value.
    """
    parts: list[tuple[str, Out, Callable[[Any], Any]]] = []
    for name, given in fields.items():
        out, source = given if isinstance(given, tuple) else (given, name)
        parts.append((name, out, source if callable(source) else _attribute(source)))
    SHAPES[title] = {
        "type": "object",
        "properties": {name: dict(out.schema) for name, out, _ in parts},
        "required": [name for name, _, _ in parts],
    }

    def write(value: Any) -> dict[str, Any]:
        return {name: out.write(find(value)) for name, out, find in parts}

    return Out({"$ref": f"#/components/schemas/{title}"}, write)


def _attribute(name: str) -> Callable[[Any], Any]:
    def find(value: Any) -> Any:
        return value[name] if isinstance(value, dict) else getattr(value, name)

    return find
