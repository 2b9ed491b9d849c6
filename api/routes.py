"""The one table of routes: Flask's rules, the OpenAPI document, which routes need the key, and error formats.

An API is a file in this folder, and its rows here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
from flask import Response, request

from api import adapter_routes, clouds, status, tgi, tokenize
from api.anthropic import messages
from api.anthropic import types as anthropic
from api.chats.conversation import ChatRequest
from api.chats.openai_shared import ModelCard, ModelList
from api.generation.prepared_request import Served
from api.http.errors import ANTHROPIC, OPENAI, ErrorFormat
from api.http.fields import Json
from api.openai import chat, completions, responses
from api.openai.responses_types import (
    CompactedConversation,
    CompactRequest,
    InputTokens,
    ResponsesRequest,
    ResponsesResponse,
)
from api.openapi import QUESTION, Route, format_of, openapi
from api.server import Read, Server, json_response, no_parser, text_parser

SAGEMAKER_ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"  # a header
SAGEMAKER_DEADLINE_S = 55.0  # SageMaker times out after 60


def generates(read: Read, renders: bool = False) -> Callable[[Server], Response]:
    """Returns the view of a route that generates what `read` makes of the body. renders: whether `read` may
    render a chat template."""
    return functools.partial(Server.generate, read=read, renders=renders)


def replies(make: Callable[[Json, Served], Any]) -> Callable[[Server], Response]:
    """Returns the view of a route that generates nothing: `make` checks the body, and returns what makes the
    response."""
    return functools.partial(Server.reply, make=make)


def invocations(server: Server) -> Response:
    """Returns the response to a request of SageMaker. A header may name a LoRA adapter; ApiError (404) is
    raised for an unknown one. What is not streamed ends after SAGEMAKER_DEADLINE_S, unless a deadline is
    configured. Raises the errors of `Server.generate`.

    A body that is JSON is a request of the API that its required field identifies. A body of plain text is a
    prompt: the response is a stream of text, or JSON as on `POST /` if `Accept` prefers JSON.
    """
    adapter = request.headers.get(SAGEMAKER_ADAPTER)
    if request.mimetype != "text/plain":
        read = of_adapter(clouds.read_invocation, adapter)
        return server.generate(read, renders=True, deadline_s=SAGEMAKER_DEADLINE_S)
    best = request.accept_mimetypes.best_match(["text/plain", "application/json"])
    read = of_adapter(tgi.compat if best == "application/json" else clouds.text, adapter)
    return server.generate(read, deadline_s=SAGEMAKER_DEADLINE_S, parser=text_parser)


def predictions(server: Server, name: str) -> Response:
    """Returns the response to a request of TorchServe, whose body is a prompt as text: a stream of text.
    name: of the model or of a LoRA adapter; ApiError (404) is raised for another one. Raises the errors of
    `Server.generate`, too."""
    return server.generate(of_adapter(clouds.text, name), parser=text_parser)


def of_adapter(read: Read, name: str | None) -> Read:
    """Returns a function that reads requests, as `read` does, for the LoRA adapter, or the model, with this
    name, which is in a header or the path. None: the request alone says which. Reading raises ApiError (404)
    for another name."""
    return lambda data, served: read(data, served.with_adapter(name) if name else served)


def infer(server: Server) -> Response:
    """Returns the response of the Ray Serve blueprint: a list with the parameter `sentence` and its
    continuation, in one text. Raises ApiError (422) without a sentence, and the errors of
    `Server.generate`."""
    sentence = request.args.get("sentence", "")
    return server.generate(lambda _data, served: clouds.continuation(sentence, served), parser=no_parser)


def info(server: Server) -> Response:
    return json_response(tgi.Info.of(server.served))


@functools.cache
def openapi_document() -> Json:
    """Returns the OpenAPI document of the table, the same object each time: it must not be changed."""
    return openapi(ROUTES)


def serve_document(_server: Server) -> Response:
    """Returns the OpenAPI document, with the root path of the request as its server."""
    return json_response(openapi_document() | {"servers": [{"url": request.script_root or "/"}]})


PROMPT = {"inputs": QUESTION, "parameters": {"max_new_tokens": 20}}
MESSAGES = {"messages": [{"role": "user", "content": QUESTION}]}
LIMITED = MESSAGES | {"max_tokens": 20}
INPUT = {"input": QUESTION, "max_output_tokens": 20}

ROUTES = (
    Route(
        "POST",
        "/generate",
        "Generate text, as one response",
        generates(tgi.generate),
        body=tgi.GenerateRequest,
        example=PROMPT,
        response=tgi.GenerateResponse,
    ),
    Route(
        "POST",
        "/generate_stream",
        "Generate text, one event per token",
        generates(tgi.generate_stream),
        body=tgi.GenerateRequest,
        example=PROMPT,
        event=tgi.StreamResponse,
    ),
    Route(
        "POST",
        "/",
        "Generate text, streamed if `stream` is true",
        generates(tgi.compat),
        body=tgi.GenerateRequest,
        example=PROMPT,
        response=list[tgi.GenerateResponse],
        event=tgi.StreamResponse,
    ),
    Route(
        "POST",
        "/v1",  # for huggingface_hub's text_generation
        "`POST /` for base URLs that end in /v1",
        generates(tgi.compat),
        body=tgi.GenerateRequest,
        example=PROMPT,
        response=list[tgi.GenerateResponse],
        event=tgi.StreamResponse,
    ),
    Route(
        "POST",
        "/tokenize",
        "The tokens of `inputs`; of vLLM's `prompt` or `messages`; of llama.cpp's `content`",
        replies(tokenize.tokenize),
        body=tgi.GenerateRequest | tokenize.TokenizePrompt | tokenize.TokenizeChat | tokenize.TokenizeContent,
        example=PROMPT,
        response=list[tokenize.SimpleToken] | tokenize.TokenizeResponse | tokenize.ContentTokens,
    ),
    Route(
        "POST",
        "/detokenize",
        "The text of `tokens`, as vLLM and llama.cpp have it",
        replies(tokenize.detokenize),
        body=tokenize.DetokenizeRequest,
        example={"tokens": [1, 2, 3]},
        response=tokenize.DetokenizeResponse,
    ),
    Route(
        "POST",
        "/chat_tokenize",
        "The text and the tokens of a chat",
        replies(tokenize.chat_tokenize),
        body=ChatRequest,
        example=LIMITED,
        response=tokenize.ChatTokenizeResponse,
    ),
    Route(
        "POST",
        "/v1/chat/completions",
        "OpenAI's chat completions",
        generates(chat.chat, renders=True),
        body=ChatRequest,
        example=LIMITED,
        response=chat.ChatCompletion,
        event=chat.ChatChunk,
    ),
    Route(
        "POST",
        "/v1/completions",
        "OpenAI's completions",
        generates(completions.completion),
        body=completions.CompletionRequest,
        example={"prompt": QUESTION, "max_tokens": 20},
        response=completions.Completion,
        event=completions.Completion,
    ),
    Route(
        "POST",
        "/v1/responses",
        "OpenAI's responses",
        generates(responses.responses, renders=True),
        body=ResponsesRequest,
        example=INPUT,
        response=ResponsesResponse,
        event=Json,
    ),
    Route(
        "GET",
        "/v1/responses/{response_id}",
        "A stored response",
        status.response,
        response=ResponsesResponse,
    ),
    Route(
        "DELETE",
        "/v1/responses/{response_id}",
        "Delete a stored response",
        status.delete_response,
        response=status.DeletedResponse,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        "The number of tokens of a response's input",
        replies(responses.input_tokens),
        body=ResponsesRequest,
        example=INPUT,
        response=InputTokens,
    ),
    Route(
        "POST",
        "/v1/responses/compact",
        "A conversation as a summary, which later requests have in its place",
        generates(responses.compact, renders=True),
        body=CompactRequest,
        example={"model": "local", "input": QUESTION},
        response=CompactedConversation,
    ),
    Route(
        "POST",
        "/v1/messages",
        "Anthropic's messages",
        generates(messages.messages, renders=True),
        body=anthropic.MessagesRequest,
        example=LIMITED,
        response=anthropic.MessagesResponse,
        event=Json,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        "The number of tokens of Anthropic's messages",
        replies(messages.count_tokens),
        body=anthropic.CountRequest,
        example=MESSAGES,
        response=anthropic.TokenCount,
    ),
    Route(
        "GET",
        "/v1/models",
        "The served model, in a list",
        status.models,
        other_errors=(ANTHROPIC,),
        response=ModelList | anthropic.AnthropicModelList,
    ),
    Route(
        "GET",
        "/v1/models/{name}",
        "The served model",
        status.model,
        other_errors=(ANTHROPIC,),
        response=ModelCard | anthropic.AnthropicModelCard,
    ),
    Route(
        "POST",
        "/v1/load_lora_adapter",
        "Load a LoRA adapter, as vLLM has it",
        adapter_routes.load_adapter,
        body=adapter_routes.LoadAdapter,
        example={"lora_name": "french", "lora_path": "french"},
        content_type="text/plain",
    ),
    Route(
        "POST",
        "/v1/unload_lora_adapter",
        "Unload a LoRA adapter when no request uses it any more",
        adapter_routes.unload_adapter,
        body=adapter_routes.UnloadAdapter,
        example={"lora_name": "french"},
        content_type="text/plain",
    ),
    Route(
        "POST",
        "/adapters",
        "SageMaker: load a LoRA adapter",
        adapter_routes.register,
        body=adapter_routes.SageMakerAdapter,
        example={"name": "french", "src": "french"},
        content_type="text/plain",
    ),
    Route(
        "DELETE",
        "/adapters/{name}",
        "SageMaker: unload a LoRA adapter",
        adapter_routes.unregister,
        content_type="text/plain",
    ),
    Route(
        "POST",
        "/invocations",
        "SageMaker: a native, chat or completion request, which its required field identifies, or a prompt",
        invocations,
        other_errors=(OPENAI,),
        body=tgi.GenerateRequest | ChatRequest | completions.CompletionRequest,
        example=PROMPT,
        response=list[tgi.GenerateResponse] | chat.ChatCompletion | completions.Completion,
        event=tgi.StreamResponse | chat.ChatChunk | completions.Completion,
        takes_text=True,
    ),
    Route(
        "POST",
        "/vertex",
        "Vertex AI: several requests at once",
        generates(clouds.vertex, renders=True),
        body=clouds.VertexRequest,
        example={"instances": [PROMPT]},
        response=clouds.VertexResponse,
    ),
    Route(
        "POST",
        "/predictions/{name}",
        "TorchServe: a prompt as text, whose continuation is streamed as text",
        predictions,
        takes_text=True,
    ),
    Route(
        "PUT",
        "/predictions/{name}",
        "`POST /predictions/{name}` for `curl --upload-file`",
        predictions,
        takes_text=True,
    ),
    Route(
        "GET",
        "/infer",
        "The Ray Serve blueprint for Inferentia: the sentence and its continuation",
        infer,
        response=list[str],
        query="sentence",
    ),
    Route(
        "GET",
        "/info",
        "The model, and the limits in force",
        info,
        response=tgi.Info,
    ),
    Route(
        "GET",
        "/version",
        "The server's version, as vLLM has it",
        status.version,
        response=status.Version,
    ),
    Route(
        "GET",
        "/health",
        "200 when requests are accepted",
        status.health,
        needs_key=False,
    ),
    Route(
        "GET",
        "/ping",
        "`GET /health` under SageMaker's name",
        status.health,
        needs_key=False,
    ),
    Route(
        "GET",
        "/",
        "`GET /health` for probes of the root",
        status.root,
        needs_key=False,
    ),
    Route(
        "GET",
        "/live",
        "200 when this API server process responds",
        status.live,
        needs_key=False,
    ),
    Route(
        "GET",
        "/metrics",
        "Metrics for Prometheus",
        status.metrics,
        needs_key=False,
        content_type="text/plain",
    ),
    Route(
        "GET",
        "/api-doc/openapi.json",
        "This document",
        serve_document,
        needs_key=False,
        response=Json,
    ),
)
BY_NAME = {route.name: route for route in ROUTES}

# msgspec 0.22.0 crashes when several threads make it learn a type at the same time; now there is one thread.
for _body in {body for route in ROUTES for body in route.bodies}:
    msgspec.json.Decoder(_body)


def error_format() -> ErrorFormat:
    """Returns the error format of the current request. It is Anthropic's if the route may choose that and the
    request has the header `anthropic-version`; else that of the API to which the path belongs, also if there
    is no such route."""
    route = BY_NAME.get(request.endpoint)
    if route and ANTHROPIC in route.errors and "anthropic-version" in request.headers:
        return ANTHROPIC
    return format_of(route.path if route else request.path)
