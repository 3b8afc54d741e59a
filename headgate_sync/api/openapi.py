"""The OpenAPI document, made from the table of routes."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from headgate_sync import __version__
from headgate_sync.api.routing import Route
from headgate_sync.api.shapes import SHAPES, Given, Out

# What any route may answer beside its own; those of a body and of a change apart.
_GUARDED = (401, 403, 429)
_MUTATING = (400, 409, 413, 422, 501)
_ALL = (400, 500, 503)
_BODY = (415,)
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": True,
    "description": "the same key repeats the answer instead of the change, for a day",
    "schema": {
        "type": "string",
        "minLength": 1,
        "maxLength": 255,
        "pattern": "^[!-~]+$",
    },
}

_STORE_TIME = {"x-store-now-ms": "the store's clock at the answer, unless it is away"}
_REPLAYED = {"Idempotency-Replayed": "true where the key had an answer; else absent"}
_SAYS_SO = {
    "type": "object",
    "properties": {"replayed": {"type": "boolean", "const": True}},
}


def document(routes: Iterable[Route], base: str) -> dict[str, Any]:
    """The description of an API whose routes are below a path."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    error = {
        "type": "object",
        "properties": {"error": {"type": "string"}},
        "required": ["error"],
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "headgate_sync control API", "version": __version__},
        "servers": [{"url": base}],
        "paths": paths,
        "components": {
            "schemas": {**SHAPES, "Error": error},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic"},
            },
        },
        # A deployment without a hook asks for neither.
        "security": [{}, {"bearer": []}, {"basic": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": _name_of(route),
        "summary": route.summary,
        "parameters": [
            *(_path_parameter(name) for name in route.variables),
            *(_query_parameter(one) for one in route.query),
            *([_KEY] if route.mutates else []),
        ],
        "responses": _responses(route),
    }
    if route.body is not None:
        required = [one.name for one in route.body if one.required]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {one.name: one.schema() for one in route.body},
        }
        if required:
            schema["required"] = required
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return made


def _name_of(route: Route) -> str:
    words = route.path.replace("{", "").replace("}", "").replace("-", "_")
    return f"{route.method.lower()}_{'_'.join(filter(None, words.split('/')))}".replace(
        ".", "_"
    )


def _path_parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _query_parameter(one: Given) -> dict[str, Any]:
    return {
        "name": one.name,
        "in": "query",
        "required": one.required,
        "schema": one.schema(),
    }


def _responses(route: Route) -> dict[str, Any]:
    made = {str(route.status): _response(route, route.status, route.answers)}
    for status, out in route.also.items():
        made[str(status)] = _response(route, status, out)
    errors = {*_ALL, *route.errors}
    errors |= {*_GUARDED} if route.guarded else set()
    errors |= {*_MUTATING} if route.mutates else set()
    errors |= {*_BODY} if route.body is not None else set()
    for status in sorted(errors):
        made[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/Error"}}
            },
        }
    return made


def _response(route: Route, status: int, out: Out | None) -> dict[str, Any]:
    made: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    headers = {
        **route.headers,
        **(_STORE_TIME if route.reads_store else {}),
        **(_REPLAYED if route.mutates else {}),
    }
    if headers:
        made["headers"] = {
            name: {"description": meaning, "schema": {"type": "string"}}
            for name, meaning in headers.items()
        }
    if out is not None:
        schema = dict(out.schema)
        if route.replays:
            schema = {"allOf": [schema, _SAYS_SO]}
        made["content"] = {route.media: {"schema": schema}}
    elif status != 204:
        made["content"] = {route.media: {"schema": {"type": "object"}}}
    return made
