"""TGI's own API: `/generate`, `/generate_stream`, `POST /` and `/info`.

Source of the shapes: the HTTP API of Text Generation Inference 3.3.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from api.chats import formats
from api.generation.prepared_request import PreparedRequest, Served
from api.generation.response_writer import GeneratedSequence, ResponseWriter, best_of, rounded
from api.http import errors, fields
from api.http.errors import event
from api.http.fields import Json, require
from api.http.types import I32, U32, U64_MAX, AtLeastOne, Positive, SamplingFields
from config import VERSION
from protocol import SAMPLING_PARAMETERS
from text.stream import Piece
from text.template import ChatTemplate, images_of

# An image in a prompt, as TGI reads it. No text is read twice, whatever it repeats.
MARKDOWN_IMAGE = re.compile(r"!\[\]\(\s*((?i:data:|https?://)[^)!]*(?:!(?!\[\]\()[^)!]*)*)\)")


class Parameters(SamplingFields, kw_only=True):
    """`parameters` of the native routes (TGI's GenerateParameters); formats.py reads `grammar`."""

    best_of: U32 | None = None
    temperature: Positive | None = None
    top_k: Annotated[I32, Meta(extra_json_schema={"minimum": 1})] | None = None
    do_sample: bool | None = None
    max_new_tokens: AtLeastOne | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: U32 | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int, Meta(ge=0, extra_json_schema={"maximum": U64_MAX})] | None = None
    top_n_tokens: U32 | None = None
    grammar: Json | None = None
    adapter_id: str | None = None


class GenerateRequest(Struct):
    """Body of the native routes. `/generate` and `/generate_stream` ignore `stream`."""

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None

    def __post_init__(self):
        self.parameters = self.parameters or Parameters()


class PrefillToken(Struct):
    """A token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class TokenOut(PrefillToken):
    """A generated token; on-device sampling gives no log-probability."""

    special: bool


class Finish(Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None


class StreamDetails(Finish):
    input_length: int


class StreamResponse(Struct):
    """One event of a native stream; the last one has `generated_text` and, if asked for, `details`."""

    index: int
    token: TokenOut
    top_tokens: list[TokenOut] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class SequenceDetails(Finish):
    prefill: list[PrefillToken]
    tokens: list[TokenOut]
    top_tokens: list[list[TokenOut]] | UnsetType = UNSET


class BestOfSequence(SequenceDetails, kw_only=True):
    """A sequence of `best_of` other than the best."""

    generated_text: str


class Details(SequenceDetails):
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET


class GenerateResponse(Struct):
    generated_text: str
    details: Details | UnsetType = UNSET


class TemplateFacts(Struct):
    """A chat template. origin: the file, or the key of a GGUF file, that the template is read from."""

    origin: str
    sha256: str

    @classmethod
    def of(cls, template: ChatTemplate) -> TemplateFacts:
        return cls(template.origin, hashlib.sha256(template.source.encode(errors="replace")).hexdigest())


class Info(Struct):
    """Body of `GET /info`: TGI's keys in TGI's order, then those of this server."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    max_batch_size: int
    model_device_type: str
    model_dtype: str
    eos_token_ids: list[int]
    sampling: str
    quantize: str | None
    kv_cache_dtype: str
    kv_bytes_per_token: int | None
    anonymous_bytes: int
    mapped_bytes: int
    state_bytes: int
    max_snapshots: int
    neuron_versions: dict[str, str | None]
    sampling_defaults: dict[str, int | float]
    stop_strings: list[str]
    chat_template: TemplateFacts | None
    tool_parser: str | None
    reasoning_parser: str | None
    input_modalities: list[str]
    adapters: list[str]

    @classmethod
    def of(cls, served: Served) -> Info:
        """Returns the facts of what is served, from the settings, the worker's facts and the model's text.
        The fields that have no value here are None."""
        info = served.info
        text = served.text
        values = dataclasses.asdict(served.config) | msgspec.structs.asdict(info)
        values |= dict.fromkeys(("model_pipeline_tag", "sha", "docker_label"))
        values |= {
            "model_id": info.model_name,
            "model_device_type": info.device,
            "model_dtype": info.dtype,
            "max_batch_size": info.batch_size,
            "validation_workers": served.config.web_concurrency,
            "chat_template": TemplateFacts.of(text.template) if text.template else None,
            "tool_parser": text.tools.format.name if text.template and text.tools.format else None,
            "reasoning_parser": text.reasoning.format.name if text.reasoning.format else None,
            "input_modalities": info.input_modalities,
            "adapters": list(info.adapters),
            "router": "neuron-textgen",
            "version": VERSION,
        }
        return cls(**{name: values[name] for name in cls.__struct_fields__})


def generate(data: Json, served: Served) -> ResponseWriter:
    return NativeResponseWriter(read_generate(data), served, streams=False)


def generate_stream(data: Json, served: Served) -> ResponseWriter:
    return NativeResponseWriter(read_generate(data), served, streams=True)


def compat(data: Json, served: Served) -> ResponseWriter:
    """Returns the writer of the response to `POST /`. The response is a stream with `stream`, else a list of
    one object. The text begins with the prompt unless `return_full_text` is false. Adds the images in the
    prompt to `served.images`. Raises ApiError for a wrong field."""
    request = read_generate(data)
    if request.parameters.return_full_text is None:
        request.parameters.return_full_text = True
    return NativeResponseWriter(request, served, streams=bool(request.stream), in_list=True)


def read_generate(data: Json) -> GenerateRequest:
    return fields.read(data, GenerateRequest, parameters=Parameters)


def check(
    request: GenerateRequest, served: Served, streams: bool, prompt_name: str = "inputs"
) -> PreparedRequest:
    """Returns the prepared request of a native request. Adds the images in the prompt to `served.images`,
    which are not loaded here. streams: whether the response is a stream. prompt_name: its prompt in errors.
    Raises ApiError for the first field that is wrong, in TGI's order. The prompt is not tokenized here, and
    the grammar not compiled."""
    config, info, p = served.config, served.info, request.parameters
    if (p.seed or 0) > U64_MAX:
        raise errors.wrong_type(f"Expected `int` <= {U64_MAX} - at `$.parameters.seed`")
    if streams:
        require(p.best_of in (None, 1), "best_of", "!= 1 is not supported when streaming tokens")
        detail = "== true is not supported when streaming tokens"
        require(not p.decoder_input_details, "decoder_input_details", detail)
    samples = _samples(p)
    best_of = p.best_of or 1
    if best_of > 1:
        require(config.max_best_of > 1, "best_of", "!= 1 is not allowed for this endpoint")
        fields.check_best_of(best_of, config)
        require(samples, "best_of", "> 1 needs sampling: set `do_sample` or `temperature`")
    adapter = _adapter_of(p, served)
    for name in ("temperature", "top_k", "max_new_tokens"):
        value = getattr(p, name)
        require(value is None or value > 0, name, "must be strictly positive")
    fields.check_sampling(p)
    stop = p.stop or []
    fields.check_stop(stop, config)
    require(best_of == 1 or p.seed is None, "seed", "must not be set when `best_of` > 1")
    fields.check_top_n(p.top_n_tokens, "top_n_tokens", config.max_top_n_tokens)
    require(request.inputs, "inputs", "cannot be empty")
    most = info.max_input_tokens
    detail = f"must be strictly positive and at most {most}. Given: {p.truncate}"
    require(p.truncate is None or 1 <= p.truncate <= most, "truncate", detail)
    gives_prompt = info.prompt_logprobs or not p.decoder_input_details
    require(gives_prompt, "decoder_input_details", fields.NO_PROMPT_LOGITS)
    prompt, image_numbers = prompt_of(request.inputs, served)
    for name in ("truncate", "decoder_input_details"):
        require(not (image_numbers and getattr(p, name)), name, fields.WITH_IMAGES)
    host_only = {"best_of": best_of > 1, "top_n_tokens": p.top_n_tokens}
    sampling = fields.sampling_of(p, samples, info, {}, host_only)
    constraint = formats.of_native(p.grammar)
    constraint.check(info)
    return PreparedRequest(
        **constraint._asdict(),
        prompt=prompt,
        prompt_name=prompt_name,
        image_numbers=image_numbers,
        sampling=sampling,
        sequences=best_of,
        max_new_tokens=p.max_new_tokens,
        stop=stop,
        truncate=p.truncate,
        top_n_tokens=p.top_n_tokens or 0,
        # Always with host sampling, as in TGI.
        logprobs=bool(info.sampling == "host" or p.details or best_of > 1 or p.top_n_tokens),
        prompt_logprobs=bool(p.decoder_input_details),
        # The client gets single tokens, so an output that its grammar completes still gets its end.
        keep_eos=bool(p.details or p.decoder_input_details or p.top_n_tokens),
        adapter=adapter,
    )


def _adapter_of(p: Parameters, served: Served) -> str:
    """Returns the LoRA adapter that the engine applies; "": none, or the one that is merged into the weights.
    An adapter that a header or a path names counts before `adapter_id`. Raises ApiError for an unknown
    adapter."""
    adapters = [*served.info.adapters, *filter(None, [served.config.merged_adapter])]
    detail = "is not supported: no adapter is served (--lora-adapters)"
    if adapters:
        detail = f"must be a served adapter: {', '.join(adapters)} (--lora-adapters)"
    adapter = served.adapter or p.adapter_id or ""
    require(adapter in ("", *adapters), "adapter_id", detail, given=adapter)
    return adapter if adapter in served.info.adapters else ""


def prompt_of(inputs: str, served: Served) -> tuple[str, Sequence[int]]:
    """Returns the escaped prompt, and the numbers of its images in their order. Adds the images to
    `served.images`. A placeholder stands for each image. If the model reads no images, `inputs` are text as
    they are, and there are no numbers. Raises ApiError for an image that cannot be added, and for one image
    too many."""
    images = served.images
    escape = served.text.tokenizer.escape
    if not images.are_read:
        return escape(inputs), ()
    texts = MARKDOWN_IMAGE.split(inputs)
    marks = [images.add(f"inputs.images[{n}]", url) for n, url in enumerate(texts[1::2])]
    return images.preprocess.placeholder.join(map(escape, texts[::2])), images_of("".join(marks))


def _samples(p: Parameters) -> bool:
    """Whether tokens are drawn at random. They are if `do_sample` is true, if there is a `temperature`, or if
    there is a filter, such as `top_p`, that has an effect."""
    has_effect = (
        parameter.is_filter and getattr(p, name) not in (None, parameter.neutral)
        for name, parameter in SAMPLING_PARAMETERS.items()
    )
    return bool(p.do_sample or p.temperature is not None or any(has_effect))


class NativeResponseWriter(ResponseWriter):
    """TGI's own formats. The constructor checks the request, adds the images in the prompt to
    `served.images`, and raises ApiError for a wrong field. `in_list`: `POST /` returns a list."""

    def __init__(self, request: GenerateRequest, served: Served, streams: bool, in_list: bool = False):
        super().__init__([check(request, served, streams)], served, streams)
        parameters = request.parameters
        self._in_list = in_list
        self._prefix = request.inputs if parameters.return_full_text else ""
        self._wants_details = parameters.details or parameters.decoder_input_details
        self._index = 0

    def whole(self, sequences: list[GeneratedSequence]) -> Struct | list:
        """Returns the best sequence, as an object, or a list of it if the route returns one. Its text begins
        with the prompt if the request asks for that. With `details` or `decoder_input_details`, it has the
        tokens of that sequence, and the other sequences."""
        best = best_of(sequences)
        response = GenerateResponse(self._prefix + best.stream.text)
        if self._wants_details:
            response.details = Details(**self._details(best))
            if len(sequences) > 1:
                response.details.best_of_sequences = [
                    BestOfSequence(generated_text=self._prefix + other.stream.text, **self._details(other))
                    for other in sequences
                    if other is not best
                ]
        return [response] if self._in_list else response

    def events(self, sequence: GeneratedSequence, pieces: list[Piece]) -> bytes:
        """Returns an event for each piece. The last one of the sequence has the whole text and, if asked for,
        the prompt before it and the details."""
        events = []
        for piece in pieces:
            self._index += 1
            response = StreamResponse(self._index, _token_out(piece))
            if piece.top:
                response.top_tokens = self._top_tokens(piece)
            if piece is pieces[-1] and sequence.finish_reason is not None:
                response.generated_text = self._prefix + sequence.stream.text
                if self._wants_details:
                    length = len(sequence.prompt)
                    response.details = StreamDetails(**self._finish(sequence), input_length=length)
            events.append(event(response))
        return b"".join(events)

    def _finish(self, sequence: GeneratedSequence) -> Json:
        return {
            "finish_reason": sequence.finish_reason,
            "generated_tokens": sequence.tokens,
            # On-device sampling does not use it.
            "seed": sequence.sampling.seed if self.info.sampling != "device" else None,
        }

    def _details(self, sequence: GeneratedSequence) -> Json:
        """Returns fields of SequenceDetails, by name: the end, the tokens and, if asked for, those of the
        prompt and the most likely ones."""
        details = self._finish(sequence)
        prompt = self._prompt_pieces(sequence) if sequence.prepared.prompt_logprobs else []
        details["prefill"] = [PrefillToken(piece.id, piece.text, rounded(piece.logprob)) for piece in prompt]
        details["tokens"] = [_token_out(piece) for piece in sequence.pieces]
        if sequence.prepared.top_n_tokens:
            details["top_tokens"] = [self._top_tokens(piece) for piece in sequence.pieces]
        return details

    def _top_tokens(self, piece: Piece) -> list[TokenOut]:
        special_ids = self.tokenizer.special_ids
        return [
            TokenOut(i, self.tokenizer.token_text(i), rounded(logprob), i in special_ids)
            for i, logprob in piece.top
        ]


def _token_out(piece: Piece) -> TokenOut:
    return TokenOut(piece.id, piece.text, rounded(piece.logprob), piece.special)
