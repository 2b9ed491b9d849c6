"""The messages between API server processes and the worker: msgspec structs in msgpack, never pickle.

A request on the wire: `Generate` (in a `SubmitRequests`), then a `PromptDone` and `Token`s inside the
`Tokens` of each step, until exactly one terminal message: a `Token` with a `finish_reason`, or an `End`.
`Cancel` asks for an early end, with the same rule. Both ends are processes of one server and trust each
other: ranges are checked once, where a request comes in (api/). engine/link.py and
api/http/engine_client.py own the sockets.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import Meta

HEARTBEAT_S = 0.25
SILENCE_S = 20 * HEARTBEAT_S  # a worker that is silent for that long is not running
MAX_LOGIT_BIAS = 1024  # tokens; more would take longer than a decode step
MAX_GRAMMAR = 500_000  # characters
MAX_IMAGE_TOKENS = 2**16 - 1  # of one image


class SamplingParameter(NamedTuple):
    """A number that says how tokens are sampled."""

    neutral: int | float  # without effect; its type is the parameter's
    limits: Meta
    on_device: bool = False  # supported by on-device sampling
    is_filter: bool = False  # without effect on greedy requests

    def allows(self, value: float) -> bool:
        limits = self.limits
        above_least = value > limits.gt if limits.ge is None else value >= limits.ge
        return above_least and (limits.le is None or value <= limits.le)


# Request fields, their checks, a model's defaults, and what on-device sampling rejects follow from this
# table; engine/sampling/sampling.py applies them.
SAMPLING_PARAMETERS = {
    "temperature": SamplingParameter(1.0, Meta(ge=0), on_device=True),
    "top_k": SamplingParameter(0, Meta(ge=-1), on_device=True, is_filter=True),  # 0 and vLLM's -1: all tokens
    "top_p": SamplingParameter(1.0, Meta(gt=0, le=1), on_device=True, is_filter=True),
    "min_p": SamplingParameter(0.0, Meta(ge=0, le=1), is_filter=True),
    "typical_p": SamplingParameter(1.0, Meta(gt=0, le=1), is_filter=True),
    "repetition_penalty": SamplingParameter(1.0, Meta(gt=0)),
    "frequency_penalty": SamplingParameter(0.0, Meta(ge=-2, le=2)),
    "presence_penalty": SamplingParameter(0.0, Meta(ge=-2, le=2)),
}


SamplingNumbers = msgspec.defstruct(
    "SamplingNumbers",
    [(name, type(each.neutral), each.neutral) for name, each in SAMPLING_PARAMETERS.items()],
    frozen=True,
)


class SamplingParams(SamplingNumbers, frozen=True):
    """How the next token is sampled from the logits. `seed` None means greedy: the most likely token. Filters
    are then neutral."""

    seed: int | None = None
    # (token id, value added to its logit)
    logit_bias: list[tuple[int, float]] = msgspec.field(default_factory=list)
    is_seed_given: bool = False  # by the client; on-device sampling has no seeds

    @property
    def host_only(self) -> list[str]:
        """The names of the parameters in use that on-device sampling does not support."""
        used = [
            name
            for name, parameter in SAMPLING_PARAMETERS.items()
            if not parameter.on_device and getattr(self, name) != parameter.neutral
        ]
        if self.is_seed_given:
            used.append("seed")
        if any(bias for _token, bias in self.logit_bias):
            used.append("logit_bias")
        return used


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's `PreparedRequest` (api/generation/prepared_request.py) and its `Generate` share."""

    sampling: SamplingParams = SamplingParams()
    top_n_tokens: int = 0
    min_new_tokens: int = 0  # no end-of-sequence token before that many tokens
    ignore_eos: bool = False  # an end-of-sequence token does not end the completion
    logprobs: bool = True  # of generated tokens; not available with on-device sampling
    prompt_logprobs: bool = False
    grammar: str = ""  # that constrains the output (text/grammar.py); "": none
    keep_eos: bool = False  # a completed grammar still gets an end-of-sequence token
    prediction: list[int] = []  # the output that the client expects, as draft tokens
    adapter: str = ""  # the name of a LoRA adapter; "": none


class Image(msgspec.Struct, frozen=True, gc=False):
    """A preprocessed image (text/images/). In prompts the tokens of an image are the negative numbers `ids`.

    The worker finds the embedding of each of these numbers (models/images/encoder_cache.py), so prefix
    caching and chunked prefill treat an image token as any other token.
    """

    key: int  # 46 bits: a keyed hash of the file and of how it is preprocessed
    tokens: int  # at most MAX_IMAGE_TOKENS
    shape: tuple[int, int, int]  # tiles; height and width of each in pixels
    pixels: bytes  # uint8 RGB [tiles, height, width, 3]
    canvas: tuple[int, ...] = ()  # how the tiles lie in the image, for families that need it

    @property
    def ids(self) -> range:
        first = -1 - (self.key << 16)
        return range(first, first - self.tokens, -1)


class Generate(GenerateOptions, frozen=True):
    """Web → worker, in `SubmitRequests`: generate one sequence that continues `prompt`. `id` is random, 63
    bits, unique among all API server processes."""

    id: int
    prompt: list[int]
    max_new_tokens: int
    # Positions in the prompt between messages, where other prompts of the same conversation may go on.
    borders: list[int] = []
    sent_at: float = 0.0  # CLOCK_MONOTONIC in seconds, the same for all processes
    request_id: str = ""  # of the HTTP request, for the log


class SubmitRequests(msgspec.Struct, tag="submit", frozen=True):
    """Web → worker: all sequences that one HTTP request asks for. All of them are admitted, or all are
    rejected."""

    generates: list[Generate]
    images: list[Image] = []  # of all prompts, each once


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Web → worker: end this request early. Its `End` still comes, unless it has its terminal message
    already. `reason` is for the log: a stop sequence, a client disconnect."""

    id: int
    reason: str


class AdapterChange(msgspec.Struct, tag="adapter_change", frozen=True):
    """Web → worker: load the LoRA adapter `name` from `source`, or unload it if `source` is empty.

    With `in_place`, an adapter of that name is replaced; without, it is an error. `AdapterChanged` with the
    same `id` answers.
    """

    id: int
    name: str
    source: str = ""  # a folder, or an id on the hub
    in_place: bool = False


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Web → worker: an API server process has started; sent again, with `ready`, once it accepts requests."""

    ready: bool


class RequestStats(msgspec.Struct, tag="request_stats", frozen=True):
    """Web → worker: a finished HTTP request, for the metrics.

    `outcome` is None for a route that generates no text, else "success" or the reason of the failure:
    overloaded, validation, incomplete, template, generation, dropped. `first_token_s` counts from the arrival
    of the HTTP request.
    """

    status: int  # HTTP; 499: client disconnect; 0: the API server process has ended
    outcome: str | None = None
    duration_s: float = 0.0
    validation_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    first_token_s: float | None = None
    input_tokens: int = 0
    generated_tokens: int = 0
    accepted_draft_tokens: int = 0  # how many of the generated ones
    max_new_tokens: int = 0
    longest_sequence: int = 0  # its generated tokens
    finish_reason: str = "stop"  # or "length" if one of its sequences is truncated
    adapter: str = ""  # of the request


class MetricsRequest(msgspec.Struct, tag="metrics_request", frozen=True):
    """Web → worker: asks for `MetricsText` with the same `id`."""

    id: int


class Token(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One generated token. `logprob` is of the model's own distribution; None if the request does not want
    log-probabilities, or with on-device sampling. `top` holds (token id, logprob), most likely first."""

    id: int
    token: int
    logprob: float | None
    top: list[tuple[int, float]] = []
    finish_reason: str | None = None  # "length" or "eos_token" on the last token
    from_draft: bool = False  # an accepted draft token


class PromptDone(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The prompt of a request has been run, except for its first `cached` tokens.

    `scores` are those of the prompt's tokens from the second on, [] if the request does not want them: the
    log-probability of each, and the `top_n_tokens` most likely (token id, logprob) in its place.
    """

    id: int
    queued_s: float
    cached: int = 0
    scores: list[tuple[float, list[tuple[int, float]]]] = []


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """Worker → web: the outputs of one step for one API server process; no token comes before its request's
    `PromptDone`."""

    tokens: list[Token]
    prompts: list[PromptDone] = []


class End(msgspec.Struct, tag="end", frozen=True):
    """Worker → web: the request `id` ends without a (further) token.

    `reason`: "cancelled"; "overloaded" (rejected at once, or not started within the longest wait); "draining"
    (rejected at once, or ended because the worker stops); "unknown_adapter" (rejected at once); "failed". The
    last two have a `message`, which a client may read.
    """

    id: int
    reason: str
    message: str = ""


class Status(msgspec.Struct, tag="status", frozen=True):
    """Worker → web, every HEARTBEAT_S and when `phase` or `full` changes: the worker's state.

    `phase` is "starting" or a phase of startup, such as "loading", then "ready" while requests are accepted,
    then "draining". `progress`: what takes long in the startup phase. `full`: new requests are rejected as
    overload. `late`: the running step counts as stuck.
    """

    phase: str
    full: bool = False
    late: bool = False
    progress: str = ""


class ModelInfo(msgspec.Struct, tag="model_info", frozen=True):
    """Worker → web: the model that is served. Limits are in tokens. Sent again when `adapters` change."""

    model_name: str
    model_sha: str | None
    tokenizer_dir: str
    vocab_size: int
    eos_token_ids: list[int]
    batch_size: int
    max_input_tokens: int
    max_total_tokens: int
    device: str
    dtype: str
    model_dir: str
    prompt_logprobs: bool  # whether log-probabilities of prompts are available
    sampling: str  # "host", "hybrid", or "device": token ids only, no log-probabilities
    quantize: str | None  # "int8" or "int4"; None: neither
    reads_images: bool
    kv_cache_dtype: str
    kv_bytes_per_token: int | None  # of all layers; None: unknown
    # Of the worker when the model was loaded: its own memory, and pages of files; 0: unknown.
    anonymous_bytes: int
    mapped_bytes: int
    state_bytes: int  # of the recurrent states of a slot; 0: the model has none
    max_snapshots: int  # of these states
    # On Neuron the versions of driver, runtime, compiler and transformers_neuronx; None: unknown.
    neuron_versions: dict[str, str | None]
    # For requests on /v1 routes, by the names of `SamplingParams`.
    sampling_defaults: dict[str, int | float]
    stop_strings: list[str]  # that also end the completions of such requests
    adapters: dict[str, str]  # LoRA adapters by name: the folder or hub id of each

    @property
    def input_modalities(self) -> list[str]:
        return ["text", "image"] if self.reads_images else ["text"]


class MetricsText(msgspec.Struct, tag="metrics", frozen=True):
    """Worker → web: all metrics, in Prometheus' text format."""

    id: int
    text: bytes


class AdapterChanged(msgspec.Struct, tag="adapter_changed", frozen=True):
    """Worker → web: the end of an `AdapterChange`. `error` says why the change failed; "": it has succeeded.
    With `is_of_machine`, the same change may succeed later."""

    id: int
    error: str = ""
    is_of_machine: bool = False


FromWeb = SubmitRequests | Cancel | AdapterChange | Hello | RequestStats | MetricsRequest
FromWorker = Tokens | End | Status | ModelInfo | MetricsText | AdapterChanged

encode = msgspec.msgpack.Encoder().encode
