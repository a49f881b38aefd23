"""The OpenAPI description of the service, from the declared fields of its requests."""

from __future__ import annotations

from typing import Any

from jpeg_dlm import __version__
from jpeg_dlm.serve import requests
from jpeg_dlm.serve.fields import required, rules

POSTS = {
    "/v1/completions": (requests.Completion, "Write texts, as the OpenAI conventions describe."),
    "/v1/embeddings": (requests.EmbeddingRequest, "Encode texts to latents, as the OpenAI conventions describe."),
    "/v1/trajectory": (requests.Trajectory, "Write texts and tell what they would be after each step."),
    "/v1/reconstruct": (requests.Reconstruction, "Encode texts to latents and decode them; tell which tokens came back."),
    "/v1/interpolate": (requests.Interpolation, "Decode points between the latents of two texts."),
    "/v1/edit": (requests.Edit, "Write variations of a text."),
}
GETS = {
    "/v1/models": "List the models and what each can do.",
    "/v1/models/{name}": "Describe one model.",
    "/healthz": "Tell that the process answers.",
    "/readyz": "Tell whether requests are accepted.",
    "/metrics": "Metrics in Prometheus' text format.",
}
ERRORS = {
    "400": "not JSON", "401": "no valid key", "404": "unknown model or path", "408": "arrives too slowly", "413": "too large",
    "415": "not application/json", "422": "a field is wrong", "429": "queue full, see Retry-After", "504": "takes too long",
}  # fmt: skip


def description() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    failed = {status: {"description": said, "content": _json(_ref("Error"))} for status, said in ERRORS.items()}
    paths: dict[str, Any] = {}
    for path, (cls, summary) in POSTS.items():
        body = {"required": True, "content": _json(_ref(cls.__name__))}
        paths[path] = {
            "post": {"summary": summary, "requestBody": body, "responses": {"200": {"description": "done"}, **failed}}
        }
    for path, summary in GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "done"}}}}
        if "{name}" in path:
            paths[path]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    schemas = {cls.__name__: _schema(cls) for cls, _ in POSTS.values()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jpeg-dlm", "version": __version__, "description": "Text by diffusion language models."},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
        }
    },
}


def _schema(cls: type) -> dict[str, Any]:
    properties = {name: rule.schema() for name, rule in rules(cls).items()}
    return {"type": "object", "properties": properties, "required": required(cls), "additionalProperties": False}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
