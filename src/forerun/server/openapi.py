"""The server's description in OpenAPI 3.1, at /openapi.json, from the requests of schemas.py and the answers of forms.py."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from forerun import __version__
from forerun.server import forms, schemas

WRONG = {  # what any request with a body may get
    400: "The body is no JSON object, or a field is unknown or cannot be used; the message names it.",
    404: "The model is not served.",
    408: "The body came too slowly.",
    413: "The body is too long.",
    415: "The body is not application/json.",
}
RUNNING = {  # what a request that runs may get as well
    429: "The queue is full; Retry-After says in how many seconds to ask again.",
    500: "The request failed in the engine.",
    503: "The engine does not work any more, or the server is shutting down.",
    504: "The answer took too long.",
}
ROUTES: dict[str, tuple[str, Any, Any, dict[int, str]]] = {  # path: what it does, request, answer, errors
    "/v1/chat/completions": ("Answer a conversation.", schemas.ChatRequest, forms.ChatCompletion, WRONG | RUNNING),
    "/v1/completions": ("Continue prompts.", schemas.CompletionRequest, forms.Completion, WRONG | RUNNING),
    "/v1/models": ("The names that are served.", None, forms.Models, {}),
    "/v1/models/{model}": ("One of them.", None, forms.Model, {404: WRONG[404]}),
    "/tokenize": ("The token ids of a text or a conversation.", schemas.TokenizeRequest, forms.Tokens, WRONG),
    "/detokenize": ("The text of token ids.", schemas.DetokenizeRequest, forms.Text, WRONG),
    "/health": ("Whether requests are answered.", None, forms.Health, {}),
    "/version": ("The version of Forerun.", None, forms.Version, {}),
    "/live": ("What the page at / shows.", None, forms.Live, {}),
    "/metrics": ("What Prometheus reads.", None, None, {}),
    "/": ("A page for people.", None, None, {}),
}
STREAMING = ("/v1/chat/completions", "/v1/completions")
EVENTS = "With stream true: server-sent events, each with a part of the answer, and [DONE] as the last."
TEXTS = {"/metrics": ("Prometheus' text format.", "text/plain"), "/": ("HTML.", "text/html")}
UNGUARDED = ("/health", "/version", "/")


def document(keys: bool) -> dict[str, Any]:
    """keys: whether the server asks for a key."""
    requests = [request for _, request, _, _ in ROUTES.values() if request is not None]
    mode: JsonSchemaMode = "validation"
    template = "#/components/schemas/{model}"
    _, given = models_json_schema([(request, mode) for request in requests], ref_template=template)
    known: dict[str, Any] = dict(given["$defs"])

    def named(form: Any) -> dict[str, str]:
        if form.__name__ not in known:
            found = TypeAdapter(form).json_schema(ref_template=template)
            known.update(found.pop("$defs", {}))
            known[form.__name__] = found
        return {"$ref": template.format(model=form.__name__)}

    def answer(what: str, form: Any) -> dict[str, Any]:
        return {"description": what, "content": {"application/json": {"schema": named(form)}}}

    def text(path: str) -> dict[str, Any]:
        what, kind = TEXTS[path]
        return {"description": what, "content": {kind: {"schema": {"type": "string"}}}}

    paths: dict[str, Any] = {}
    for path, (what, request, form, errors) in ROUTES.items():
        guarded = keys and path not in UNGUARDED
        responses: dict[str, Any] = {"200": answer("The answer.", form) if form is not None else text(path)}
        responses |= {str(status): answer(why, forms.ErrorBody) for status, why in errors.items()}
        if path in STREAMING:
            responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string", "description": EVENTS}}
        if path == "/health":
            responses["503"] = answer("They are not.", form)
        if guarded:
            responses["401"] = answer("The key is missing or wrong.", forms.ErrorBody)
        operation: dict[str, Any] = {"summary": what, "responses": responses}
        if guarded:
            operation["security"] = [{"key": []}]
        if request is not None:
            schema = {"$ref": template.format(model=request.__name__)}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if "{model}" in path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {"get" if request is None else "post": operation}
    components: dict[str, Any] = {"schemas": known}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forerun", "version": __version__, "description": "OpenAI's API, with speculative decoding."},
        "paths": paths,
        "components": components,
    }
