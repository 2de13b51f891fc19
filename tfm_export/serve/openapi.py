"""The description of the server's paths, for tools and for people."""

from __future__ import annotations

import html
from dataclasses import fields
from typing import Any

import tfm_export
from tfm_export.decoding import DecodeOptions
from tfm_export.serve.limits import RequestLimits
from tfm_export.serve.parameters import OF_CALLS, OF_OPTIONS

STATUSES = {
    "400": "something in the request cannot be served; the error names all of it",
    "401": "an API key is needed",
    "404": "there is no such model or version",
    "413": "the body is too large",
    "415": "the body's coding is unknown",
    "429": "too many sources wait; Retry-After says when to come again",
    "500": "the model gave a number that is not finite",
    "503": "the model is being replaced, or the server ends or has failed",
    "504": "the time was over before decoding began",
}
ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
SCHEMAS: dict[type | str, dict[str, Any]] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "str": {"type": "string"},
}
OTHER_PATHS = (
    ("/v2", "get", "The server's name, version and extensions."),
    ("/v2/health/live", "get", "200 while the process can go on; no key is needed."),
    ("/v2/health/ready", "get", "200 while requests are taken; no key is needed."),
    ("/metrics", "get", "Numbers in Prometheus' text format."),
    ("/v2/repository/index", "post", "All models, with their versions."),
    ("/v2/repository/models/{model}/load", "post", "Load what is new of a model (--model-control)."),
    ("/v2/repository/models/{model}/unload", "post", "Take a model out of service (--model-control)."),
    ("/v2/models/{model}", "get", "The model's inputs and outputs."),
    ("/v2/models/{model}/ready", "get", "200 while the model is in service."),
    ("/v2/models/{model}/config", "get", "The model's inputs and outputs in Triton's form."),
)


def description(limits: RequestLimits) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    name = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    paths: dict[str, Any] = {}
    for path, method, summary in OTHER_PATHS:
        operation: dict[str, Any] = {"summary": summary, "responses": _responses({"description": "it is so"})}
        if "{model}" in path:
            operation["parameters"] = name
        paths.setdefault(path, {})[method] = operation
    text = {"type": "string", "minLength": 1}
    generate = {
        "type": "object",
        "properties": {"text_input": text, "id": {"type": "string"}, "parameters": _parameters(limits)},
        "required": ["text_input"],
        "additionalProperties": False,
    }
    answer = {"type": "object", "properties": {"text_output": {"type": "string"}}, "required": ["text_output"]}
    tensor = {
        "type": "object",
        "properties": {
            "name": {"enum": ["text_input", "input_ids", "input_lengths"]},
            "datatype": {"enum": ["BYTES", "INT64", "INT32"]},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "data": {"type": "array"},
        },
        "required": ["name", "datatype", "shape", "data"],
    }
    infer = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "inputs": {"type": "array", "items": tensor, "minItems": 1},
            "parameters": _parameters(limits),
        },
        "required": ["inputs"],
    }
    outputs = {"type": "object", "properties": {"outputs": {"type": "array"}}, "required": ["outputs"]}
    for path, summary, schema, content in (
        ("generate", "Decode one text.", generate, {"application/json": {"schema": answer}}),
        ("generate_stream", "Decode one text; its pieces are server-sent events.", generate, {"text/event-stream": {}}),
        (
            "infer",
            f"Decode up to {limits.texts} texts, or sources of ids (the Open Inference Protocol v2).",
            infer,
            {"application/json": {"schema": outputs}, "application/octet-stream": {}},
        ),
    ):
        paths[f"/v2/models/{{model}}/{path}"] = {
            "post": {
                "summary": summary,
                "parameters": name,
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": _responses({"description": "the answer", "content": content}),
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "tfm-export", "version": tfm_export.__version__},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _responses(good: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": ERROR}}
    return (
        {"200": good}
        | {status: {"description": what, "content": error} for status, what in STATUSES.items()}
        | {"403": {"description": "models are not loaded by requests here", "content": error}}
    )


def _parameters(limits: RequestLimits) -> dict[str, Any]:
    types = {field.name: str(field.type) for field in fields(DecodeOptions)}
    known = {name: dict(SCHEMAS.get(types[name].removesuffix(" | None"), {})) for name in OF_OPTIONS}
    known |= {name: dict(SCHEMAS[kinds[-1].__name__]) for name, kinds in OF_CALLS.items()}
    for name in ("beam_size", "num_hypotheses"):
        known[name] |= {"minimum": 1, "maximum": limits.hypotheses}
    known["deadline"] |= {"minimum": 0, "maximum": limits.seconds}
    return {"type": "object", "properties": known, "additionalProperties": False}


def page(limits: RequestLimits) -> str:
    """The same as a page, without anything that is not in it."""
    rows = [
        f"<tr><td><code>{method.upper()}</code></td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(operation['summary'])}</td></tr>"
        for path, methods in sorted(description(limits)["paths"].items())
        for method, operation in methods.items()
    ]
    codes = [f"<tr><td>{status}</td><td>{html.escape(what)}</td></tr>" for status, what in STATUSES.items()]
    names = ", ".join(f"<code>{name}</code>" for name in (*OF_OPTIONS, *OF_CALLS))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>tfm-export</title>"
        "<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td{padding:.2em 1em .2em 0;vertical-align:top}</style>"
        f"<h1>tfm-export {html.escape(tfm_export.__version__)}</h1>"
        '<p>For tools: <a href="openapi.json">openapi.json</a></p>'
        f"<h2>Paths</h2><table>{''.join(rows)}</table>"
        "<p>All of <code>/v2/models/{model}</code> is there for <code>/v2/models/{model}/versions/{version}</code>, "
        f"too.</p><h2>Parameters</h2><p>{names}</p><h2>Errors</h2><table>{''.join(codes)}</table>"
    )
