"""The routes of cloud platforms: SageMaker's `/invocations`, Vertex AI's `/vertex`, `/infer` of the Ray Serve
blueprint for Inferentia, and TorchServe's `/predictions`. They wrap requests of the other APIs.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta, Struct

from api import tgi
from api.chats.conversation import ChatRequest, prepare_chat
from api.generation.prepared_request import PreparedRequest, Served
from api.generation.response_writer import GeneratedSequence, ResponseWriter, best_of
from api.http import fields
from api.http.errors import OPENAI, TGI, ApiError
from api.http.fields import Json, require
from api.http.types import SCHEMA
from api.openai import chat, completions
from api.tgi import GenerateRequest
from text.output.parser import Content
from text.stream import Piece

# The APIs of `/invocations` by a body's required field, and their error formats.
INVOCATIONS = {
    "inputs": (tgi.compat, TGI),
    "messages": (chat.chat, OPENAI),
    "prompt": (completions.completion, OPENAI),
}
# Fields that are not supported on Vertex, which returns texts.
ONLY_TEXT = (
    "stream",
    "details",
    "decoder_input_details",
    "top_n_tokens",
    "logprobs",
    "top_logprobs",
    "tools",
    "return_token_ids",
    "prompt_logprobs",
)
# Read one by one, each as its own type.
PREDICTIONS_BODIES = [{"$ref": SCHEMA.format(name=kind.__name__)} for kind in (GenerateRequest, ChatRequest)]
Instance = Annotated[Any, Meta(extra_json_schema={"anyOf": PREDICTIONS_BODIES})]


class VertexRequest(Struct):
    """Body of `POST /vertex`; each instance is `inputs` with `parameters`, or a chat request."""

    instances: list[Instance]


class VertexResponse(Struct):
    predictions: list[str]


def read_invocation(data: Json, served: Served) -> ResponseWriter:
    """Returns the writer of the response to a native, chat or completion request. The first field of
    INVOCATIONS that the body has says which. Raises ApiError, in the error format of that API, for a wrong
    field; in the route's if the body has none of these fields."""
    read, error_format = fields.choose_variant(data, INVOCATIONS)
    try:
        return read(data, served)
    except ApiError as error:
        error.format = error_format
        raise


def text(data: Json, served: Served) -> ResponseWriter:
    """Returns the writer of a stream of plain text: the continuation of the prompt in a native request.
    TorchServe's handlers for Inferentia2 send the same. Raises ApiError for a wrong field."""
    return TextResponseWriter(
        [tgi.check(tgi.read_generate(data), served, streams=True)], served, streams=True
    )


def vertex(data: Json, served: Served) -> ResponseWriter:
    """Returns the writer of the predictions for several requests, each of which is native or a chat. Raises
    ApiError without instances, for too many, and for the first instance that is wrong: the fields of all are
    read before any is checked. Adds images to `served.images`. Renders chats in a child process, and waits
    for it."""
    requests = []
    prefixes = []
    given = fields.read(data, VertexRequest).instances
    if not given:
        # TGI's `error_type`.
        raise ApiError(422, "Input validation error", "Input validation error: `instances` cannot be empty")
    fields.check_batch(len(given), "instances", "instances", served.config)
    for instance in [_instance(each) for each in given]:
        if isinstance(instance, ChatRequest):
            requests.append(prepare_chat(instance, served))
            prefixes.append("")
        else:
            requests.append(tgi.check(instance, served, streams=False))
            prefixes.append(instance.inputs if instance.parameters.return_full_text else "")
    return PredictionsResponseWriter(requests, served, prefixes, VertexResponse)


def continuation(sentence: str, served: Served) -> ResponseWriter:
    """Returns the writer of a list of one text: the sentence and its continuation. Adds images in the
    sentence to `served.images`. Raises ApiError for an empty sentence, and for one that cannot run."""
    require(sentence, "sentence", "cannot be empty")
    prepared = tgi.check(GenerateRequest(sentence), served, streams=False, prompt_name="sentence")
    return PredictionsResponseWriter([prepared], served, [sentence], list)


def _instance(given: Any) -> GenerateRequest | ChatRequest:
    """Returns an instance as a native request if it has `inputs`, else as a chat request. Raises ApiError for
    a wrong field, and for fields that are not supported in an instance."""
    data = fields.convert(given, Json)
    read_chat = functools.partial(fields.read, kind=ChatRequest)
    instance = fields.choose_variant(data, {"inputs": tgi.read_generate, "messages": read_chat})(data)
    parameters = getattr(instance, "parameters", None)
    for name in ONLY_TEXT:
        asked = getattr(instance, name, None) or getattr(parameters, name, None)
        require(not asked, name, "is not supported in `instances`: a prediction is a text")
    require((getattr(instance, "n", None) or 1) == 1, "n", "!= 1 is not supported in `instances`")
    return instance


class PredictionsResponseWriter(ResponseWriter):
    """The best text of each request, without reasoning, after its prefix, in the order of `requests`.

    prefixes: one for each request. form: makes the body of these texts.
    """

    def __init__(
        self,
        requests: list[PreparedRequest],
        served: Served,
        prefixes: list[str],
        form: Callable[[list[str]], Struct | list],
    ):
        super().__init__(requests, served)
        self._prefixes = prefixes
        self._form = form

    def whole(self, sequences: list[GeneratedSequence]) -> Struct | list:
        """Returns what `form` makes of the texts: for each request its prefix, then the best sequence without
        reasoning and calls."""
        texts = (best_of(candidates).output.text_of(Content) for candidates in self._by_request(sequences))
        return self._form([prefix + text for prefix, text in zip(self._prefixes, texts)])


class TextResponseWriter(ResponseWriter):
    """The text of one request as it is generated, and nothing else."""

    content_type = "text/plain; charset=utf-8"
    keep_alive = b""

    def events(self, sequence: GeneratedSequence, pieces: list[Piece]) -> bytes:
        return "".join(piece.text for piece in pieces if not piece.special).encode()

    def failure(self, error: ApiError) -> bytes:
        """Raises ConnectionResetError, which breaks the connection. In a plain text an error would look like
        a part of the text."""
        raise ConnectionResetError(errno.ECONNRESET, str(error))
