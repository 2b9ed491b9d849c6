"""From the body of a request to its API's type, and the rules of fields that several APIs share.

A body is read once as JSON, then its types are checked, then its names: a field that is misspelled, not
supported or of another API is rejected by name.
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from api.http import errors
from api.http.errors import ApiError, invalid
from api.http.types import U64_MAX, SamplingFields, SamplingOptions
from config import DEVICE_TOP_K, Config
from protocol import SAMPLING_PARAMETERS, ModelInfo, SamplingParameter, SamplingParams
from run import Json

T = TypeVar("T", bound=Struct)
V = TypeVar("V")

# An escape in JSON: two for a surrogate pair, half of one, or any other.
JSON_ESCAPE = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")  # where a word begins
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # begins what Windows tools write
# Characters of a stop sequence. To find out whether a text may yet become one takes time that grows with
# their square.
MAX_STOP = 1_000
MAX_FIELDS = 256  # each unknown one is compared with all known ones, to find misspelled ones
# Fields of TGI, OpenAI and other servers that would change the output and are not supported: the values that
# they may have, which change nothing, and their names.
_NOT_SUPPORTED: list[tuple[Sequence[Any], str]] = [
    (
        [],
        "guided_grammar ebnf structural_tag allowed_token_ids logits_processors prompt_logprobs "
        "truncate_prompt_tokens max_length min_length chat_template documents max_tokens_to_sample "
        "n_predict num_predict web_search_options logprob_token_ids prompt_embeds repetition_detection "
        "stop_regex lora_path custom_logit_processor previous_input_messages eos_token_id suppress_tokens "
        "begin_suppress_tokens max_time format response_schema",
    ),
    (
        [False],
        "ignore_eos_token ban_eos_token no_stop_trim "
        "watermark watermarking continue_final_message use_beam_search early_stopping echo "
        "include_stop_str_in_output return_token_ids return_tokens_as_token_ids return_token_offsets "
        "return_prompt_text return_assistant_tokens_mask enable_response_messages dynamic_temperature "
        "temperature_last json_mode",
    ),
    ([True], "add_generation_prompt skip_special_tokens spaces_between_special_tokens include_reasoning"),
    (
        [0],
        "no_repeat_ngram_size mirostat mirostat_mode top_a epsilon_cutoff eta_cutoff dry_multiplier "
        "xtc_probability dynatemp_range smoothing_factor nsigma penalty_alpha diversity_penalty "
        "min_new_tokens",
    ),
    ([0, -1], "top_n_sigma t_max_predict_ms"),
    (
        [1],
        "best_of num_beams num_beam_groups num_return_sequences length_penalty repeat_penalty tfs_z "
        "guidance_scale",
    ),
    (["", []], "adapter_id negative_prompt banned_strings"),
    ([[]], "functions stop_token_ids bad_words bad_words_ids stop_strings stopping_strings"),
    ([{}], "audio media_io_kwargs"),
    ([[], ["text"]], "modalities"),
    (["none", "auto"], "function_call"),
]
NOT_SUPPORTED = {name: neutral for neutral, names in _NOT_SUPPORTED for name in names.split()}
# Fields that change the output. A body that cannot have one of them is rejected: the client means a field of
# another API, or another place in the body.
_STRUCTURED_OUTPUT_FIELDS = [
    "grammar",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_whitespace_pattern",
]
_LIMITS = ["max_new_tokens", "max_output_tokens", "max_completion_tokens", "max_tokens"]
_OTHER_NAMES = (
    "n do_sample stop_sequences return_full_text truncate top_n_tokens tools tool_choice "
    "chat_template_kwargs mm_processor_kwargs regex json_schema output_format system instructions parameters "
    "enable_thinking think thinking reasoning extra_body add_special_tokens reasoning_effort "
    "thinking_token_budget thinking_budget_tokens thinking_budget"
)
CHANGES_TEXT = {
    *SamplingOptions.__struct_fields__,
    *_STRUCTURED_OUTPUT_FIELDS,
    *_LIMITS,
    *_OTHER_NAMES.split(),
}
SAME_MEANING = {
    **dict.fromkeys([*_LIMITS, "n_predict", "num_predict"], _LIMITS),
    "repeat_penalty": ["repetition_penalty"],
    "min_new_tokens": ["min_tokens"],
    "stop_sequences": ["stop"],
    "stop_strings": ["stop", "stop_sequences"],
    "stopping_strings": ["stop", "stop_sequences"],
    "stop": ["stop_sequences"],
    "reasoning_effort": ["reasoning", "output_config"],
    "enable_thinking": ["reasoning", "thinking"],
    "think": ["reasoning", "thinking"],
    "thinking": ["reasoning"],
    "reasoning": ["thinking"],
    # Responses have `text.format`, Anthropic's messages `output_config.format`.
    **{
        name: [*_STRUCTURED_OUTPUT_FIELDS, "text", "output_config"]
        for name in (*_STRUCTURED_OUTPUT_FIELDS, "output_format", "format", "response_schema", "json_mode")
    },
}
HARMLESS_LOOKALIKES = {"mode", "models"}  # harmless fields of other servers that look misspelled
WITH_IMAGES = "is not supported in a request with images"
NEEDS_HOST = "needs --sampling host or hybrid (SAMPLING): this server samples on the device"
NO_PROMPT_LOGITS = "is not supported here: it needs chunked prefill, and --sampling host or hybrid (SAMPLING)"


@dataclass(frozen=True)
class FieldNames:
    """An API's names for the fields of a chat, for its error messages; by default those of chat completions.

    messages: the path of each of the chat's messages in the request; (): `messages[0]` and so on.
    """

    messages: Sequence[str] = ()
    prompt: str = "messages"
    limit: str = ""  # max_tokens or max_completion_tokens
    least_limit: int = 1
    stop: str = "stop"
    logprobs: str = "logprobs"
    budget: str = "thinking_token_budget"
    format: str = "response_format"
    nests_tools: bool = True  # a tool has its fields in an object `function` or `custom`
    parameters: str = ".parameters"
    allowed_tools: str = ".allowed_tools"  # of `tool_choice`

    def message(self, n: int) -> str:
        return self.messages[n] if self.messages else f"messages[{n}]"


CHAT_FIELDS = FieldNames()


def parse_body(body: bytes) -> Json:
    """Returns the JSON object of a request's body. A byte order mark is dropped, and half of a surrogate pair
    becomes a question mark. Raises ApiError: 400 when the body is not JSON or is nested too deeply, 422 when
    it is JSON of another type, or has a number that is too large."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        data = _decode_json(without_surrogates(body.removeprefix(BYTE_ORDER_MARK)))
    return convert(data, Json)


def _decode_json(body: bytes) -> Any:
    """Returns any JSON value. Raises ApiError: 400 when `body` is not JSON or is nested too deeply, 422 for a
    number that is too large."""
    try:
        return msgspec.json.decode(body)
    except msgspec.ValidationError as error:  # JSON, but a number that no float or integer holds
        raise errors.wrong_type(str(error).partition(" - at ")[0]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = f"Failed to parse the request body as JSON: {error}"
        raise ApiError(400, "validation", what) from None


def without_surrogates(text: bytes) -> bytes:
    """JSON with a question mark instead of each escape that is half of a surrogate pair, which no text can
    hold. Agents truncate long texts within an emoji, and send such a text again with every later request."""
    return JSON_ESCAPE.sub(lambda escape: b"?" if escape["half"] else escape[0], text)


def parse_text(body: bytes, charset: str) -> Json:
    """Returns the native request `{"inputs": prompt}` of a body that is the prompt itself. A byte order mark
    is dropped. Raises ApiError: 400 when the body is not in `charset`, 422 when it is empty."""
    if not body:
        raise invalid("inputs", "cannot be empty: the request body is the prompt. Given: no body")
    try:
        return {"inputs": body.decode(charset).removeprefix("\ufeff")}
    except UnicodeDecodeError as error:
        what = f"Failed to read the request body as text in {charset}: {error.reason} (byte {error.start})"
        raise ApiError(400, "validation", what) from None


def convert(data: Any, kind: type[V]) -> V:
    """Returns `data` as `kind`, as msgspec converts it. Raises ApiError (422) for another type."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise errors.wrong_type(str(error)) from None


def read(data: Json, kind: type[T], parameters: type[Struct] | None = None) -> T:
    """Returns a request as `kind`. Raises ApiError (422) for a field of the wrong type, and for one that is
    missing, misspelled, not supported, or of another API; also for more than MAX_FIELDS fields. Other unknown
    fields are ignored, as are fields that are null, and unsupported ones whose value changes nothing. In
    inner objects other than `parameters`, unknown fields are ignored but for some that look misspelled. Whole
    numbers may be written as 10.0 in the request and in `parameters`, `thinking` and `reasoning`. Values are
    checked no further.

    parameters: the type of the field `parameters`, if the request has its options in that field; None: the
    options are fields of the request itself.
    """
    request = convert(_with_whole_numbers(data), kind)
    usable = kind if parameters is None else parameters
    _check_names(data, kind, usable)
    if parameters and data.get("parameters"):
        _check_names(data["parameters"], parameters, parameters)
    elif parameters is None:
        _check_objects(data, request)
    return request


def _with_whole_numbers(data: Json) -> Json:
    """Returns a copy of a request with 10 instead of 10.0, which clients in JavaScript and Lua write. Numbers
    in the objects `parameters`, `thinking` and `reasoning` change too, those in other objects do not."""
    numbers = {
        name: int(value) for name, value in data.items() if isinstance(value, float) and value.is_integer()
    }
    for name in ("parameters", "thinking", "reasoning"):
        if isinstance(data.get(name), dict):
            numbers[name] = _with_whole_numbers(data[name])
    return data | numbers


def choose_variant(data: Json, variants: dict[str, V]) -> V:
    """Returns the value of the first key in `variants` that is a field of the request, and not null. Raises
    ApiError (422) if the request has none of these fields."""
    for name, variant in variants.items():
        if data.get(name) is not None:
            return variant
    names = ", ".join(f"`{name}`" for name in variants)
    raise errors.wrong_type(f"data did not match any variant: one of {names} is needed")


def _check_names(given: Json, kind: type[Struct], usable: type[Struct]) -> None:
    """Raises ApiError (422) for a field that is not supported, is misspelled, or belongs to another API or
    place, and for more than MAX_FIELDS fields.

    Ignored are other unknown fields, those of HARMLESS_LOOKALIKES, fields that are null, and fields of
    NOT_SUPPORTED with a value that changes nothing. kind: the type of `given`. usable: the type that has the
    options: `kind`, or the type of the field `parameters`.
    """
    for name in _unknown(given, kind):
        if name in HARMLESS_LOOKALIKES:
            continue
        if name in NOT_SUPPORTED:
            changes_nothing = given[name] in NOT_SUPPORTED[name]
            require(changes_nothing, name, f"is not supported{_hint(name, kind, usable)}")
        elif name in CHANGES_TEXT:
            raise invalid(name, f"is an unknown field{_hint(name, kind, usable)}")
        else:
            _check_spelling(name, kind)


def _check_objects(data: Json, request: Struct) -> None:
    """Raises ApiError for a misspelled field of one of the objects in a request that have a type, and for
    more than MAX_FIELDS fields in one. Objects in lists or in other objects are not checked."""
    for name in request.__struct_fields__:
        inner = getattr(request, name)
        if isinstance(inner, Struct) and data.get(name):
            for unknown in _unknown(data[name], type(inner)):
                _check_spelling(unknown, type(inner), f"{name}.")


def _unknown(given: Json, kind: type[Struct]) -> list[str]:
    """Returns the names in `given` that `kind` does not have, sorted, without fields that are null. Raises
    ApiError if `given` has too many."""
    if len(given) > MAX_FIELDS:
        raise invalid(None, f"a request must have at most {MAX_FIELDS} fields. Given: {len(given)}")
    return sorted(name for name in given if given[name] is not None and name not in kind.__struct_fields__)


def _check_spelling(name: str, kind: type[Struct], path: str = "") -> None:
    """Raises ApiError for a name that looks like one of the fields of `kind`. path: where it is."""
    # As the fields here are written: `maxTokens` and `max-tokens` are `max_tokens`.
    written = CAMEL_CASE.sub("_", name[:40]).replace("-", "_").lower()
    if similar := difflib.get_close_matches(written, kind.__struct_fields__, n=1, cutoff=0.85):
        raise invalid(path + name[:40], f"is an unknown field; did you mean `{similar[0]}`?")


def _hint(name: str, kind: type[Struct], usable: type[Struct]) -> str:
    """Returns what to use instead of an unknown field, as the end of a sentence; "": nothing is known. kind:
    the type of the object with the field. usable: the type that has the options: `kind`, or the type of its
    field `parameters`."""
    if name == "extra_body":
        return ", but a parameter of OpenAI's clients: put its fields beside the others"
    place = "" if usable is kind else " in `parameters`"
    meant = [other for other in SAME_MEANING.get(name, [name]) if other in usable.__struct_fields__]
    return f"; use `{meant[0]}`{place}" if meant else ""


def require(holds: object, param: str, detail: str, given: str | None = None) -> None:
    """Raises ApiError (422) for the field `param` unless `holds`. detail: goes on after the name of the
    field, as in "must be positive". given: the client's own words, which the log does not get."""
    if not holds:
        raise invalid(param, detail, given=given)


def check_batch(count: int, what: str, param: str, config: Config) -> None:
    """Raises ApiError (422, TGI's `batch size exceeded`) for more than --max-client-batch-size. what: what is
    counted, in the plural, for the error. param: the field."""
    most = config.max_client_batch_size
    if count > most:
        limit = f"Number of {what} exceeds the maximum allowed batch size of {most}"
        text = f"{limit} (--max-client-batch-size raises it). Given: {count}"
        raise ApiError(422, "batch size exceeded", text, param=param)


def check_best_of(best_of: int, config: Config) -> None:
    detail = f"must be > 0 and <= {config.max_best_of} (--max-best-of raises it). Given: {best_of}"
    require(best_of <= config.max_best_of, "best_of", detail)


def check_sampling(fields: SamplingFields) -> None:
    """Raises ApiError (422) for a field outside of the limits that native and OpenAI requests share.

    Unlike in TGI, `top_p` may be 1.0, which clients send for no filter, and a filter may be 0 if the
    temperature is 0.
    """
    for name, parameter in SAMPLING_PARAMETERS.items():
        value = getattr(fields, name)
        is_unused = parameter.is_filter and value == fields.temperature == 0
        require(value is None or is_unused or parameter.allows(value), name, _limits(parameter))


def _limits(parameter: SamplingParameter) -> str:
    """Returns the limits of a sampling parameter, in TGI's words, such as "must be >= 0.0 and <= 1.0"."""
    limits = parameter.limits
    kind = type(parameter.neutral)
    if limits.gt == 0 and limits.le is None:
        return "must be strictly positive"
    least = f"> {kind(limits.gt)}" if limits.ge is None else f">= {kind(limits.ge)}"
    return f"must be {least}" if limits.le is None else f"must be {least} and <= {kind(limits.le)}"


def check_stop(stop: list[str], config: Config, name: str = "stop") -> None:
    """Raises ApiError (422) for too many stop sequences, and for one of more than MAX_STOP characters. name:
    the field's name."""
    most = config.max_stop_sequences
    detail = f"supports up to {most} stop sequences (--max-stop-sequences raises it). Given: {len(stop)}"
    require(len(stop) <= most, name, detail)
    longest = max(map(len, stop), default=0)
    detail = f"may have at most {MAX_STOP} characters in a stop sequence. Given: {longest}"
    require(longest <= MAX_STOP, name, detail)


def check_top_n(n: int | None, name: str, most: int) -> None:
    detail = f"must be >= 0 and <= {most} (--max-top-n-tokens raises it). Given: {n}"
    require((n or 0) <= most, name, detail)


def check_ids(ids: list[int], name: str, info: ModelInfo) -> None:
    """Raises ApiError (422) for the first token id outside of the vocabulary. name: the field's name."""
    last = info.vocab_size - 1
    unknown = next((token for token in ids if not 0 <= token <= last), None)
    detail = f"holds token {unknown}, but the model's vocabulary has the tokens 0 to {last}"
    require(unknown is None, name, detail)


def sampling_of(
    fields: SamplingFields,
    samples: bool,
    info: ModelInfo,
    defaults: Mapping[str, int | float],
    host_only: Json,
    logit_bias: Sequence[tuple[int, float]] = (),
) -> SamplingParams:
    """Returns how tokens are sampled. A result without a seed means that each step takes the most likely
    token.

    samples: whether tokens are drawn at random; the seed is random if the request has none. A request that is
    not sampled may have a seed and filters, which do nothing: the result has none of them. defaults: the
    values of fields that the request leaves out. A temperature of 0 becomes 1, so the caller says by
    `samples` that it means greedy; a `top_k` of -1 becomes 0.

    host_only: whether the request uses each of these further fields, which need host sampling, by the name of
    the field. If the device samples, raises ApiError (422) for the first field in use that needs host
    sampling, and for a `top_k` above DEVICE_TOP_K.
    """
    seed = None
    if samples:
        # OpenAI's may be negative.
        seed = secrets.randbits(64) if fields.seed is None else fields.seed & U64_MAX
    numbers = dict(defaults)
    for name, parameter in SAMPLING_PARAMETERS.items():
        if parameter.is_filter and not samples:
            numbers[name] = parameter.neutral
        elif getattr(fields, name) is not None:
            numbers[name] = getattr(fields, name)
    numbers["temperature"] = numbers.get("temperature") or SAMPLING_PARAMETERS["temperature"].neutral
    numbers["top_k"] = max(numbers.get("top_k", 0), 0)
    is_seed_given = samples and fields.seed is not None
    sampling = SamplingParams(**numbers, seed=seed, is_seed_given=is_seed_given, logit_bias=list(logit_bias))
    if info.sampling == "device":
        if used := [*filter(host_only.get, host_only), *sampling.host_only]:
            raise invalid(used[0], NEEDS_HOST)
        too_many = f"above {DEVICE_TOP_K} {NEEDS_HOST}. Given: {sampling.top_k}"
        require(sampling.top_k <= DEVICE_TOP_K, "top_k", too_many)
    return sampling
