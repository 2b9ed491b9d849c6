"""From the body of a request to `Job`s: the rules of every field.

A body is parsed into its type (schema.py) and checked in TGI's order of fields. The result is a `Job` for each prompt: what to
generate, valid and complete. The only place that knows a field's rule. It knows neither Flask nor ZeroMQ.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from api import errors, formats
from api import types as schema
from api.errors import ApiError, invalid
from api.types import U64_MAX, ChatRequest, CompletionRequest, GenerateRequest, Parameters, SamplingFields
from config import DEVICE_TOP_K, Config
from protocol import MAX_GRAMMAR, MAX_LOGIT_BIAS, GenerateOptions, ModelInfo, Sampling
from text.reader import Reading

# Made while there is one thread: msgspec 0.22.0 crashes when several threads make it learn a type at the same time.
_KINDS = (GenerateRequest, ChatRequest, CompletionRequest, schema.ResponsesRequest, schema.VertexRequest)
_decoders = {kind: msgspec.json.Decoder(kind) for kind in _KINDS}
_fields = msgspec.json.Decoder(dict[str, Raw])
T, V = TypeVar("T", bound=Struct), TypeVar("V")
# Fields of TGI, OpenAI and other servers that would change the output and are not supported, by the values that they may have.
NOT_SUPPORTED: dict[str, Sequence[Any]] = {
    name: neutral
    for neutral, names in [
        (
            [],
            "guided_grammar ebnf structural_tag allowed_token_ids logits_processors prompt_logprobs truncate_prompt_tokens",
        ),
        (
            [],
            "max_length min_length chat_template documents max_tokens_to_sample n_predict num_predict web_search_options",
        ),
        (
            [False],
            "watermark continue_final_message use_beam_search early_stopping include_stop_str_in_output",
        ),
        ([True], "add_generation_prompt skip_special_tokens spaces_between_special_tokens"),
        (
            [0],
            "no_repeat_ngram_size mirostat top_a epsilon_cutoff eta_cutoff dry_multiplier xtc_probability dynatemp_range",
        ),
        ([1], "num_beams length_penalty repeat_penalty tfs_z"),
        ([""], "adapter_id"),
        ([[]], "functions stop_token_ids bad_words"),
        ([{}], "audio chat_template_kwargs"),
        ([[], ["text"]], "modalities"),
        (["none", "auto"], "function_call"),
    ]
    for name in names.split()
}
# Where a request has no such field, one of another API or of another place in the body is meant.
CHANGES_TEXT = {
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "stop_sequences",
    "ignore_eos",
    "n",
    "logit_bias",
}
CHANGES_TEXT |= {"presence_penalty", "echo", *Parameters.__struct_fields__} - {
    "details",
    "decoder_input_details",
}
FORMATS = ["grammar", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"]
CHANGES_TEXT |= {"tools", "tool_choice", "regex", "json_schema", *FORMATS}
MOST_TOKENS = ["max_new_tokens", "max_output_tokens", "max_completion_tokens", "max_tokens"]
SAME_MEANING = dict.fromkeys(MOST_TOKENS, MOST_TOKENS) | {"stop_sequences": ["stop"]}
SAME_MEANING |= {name: [*FORMATS, "text"] for name in FORMATS}  # Responses have `text.format`
# Harmless fields of other servers that look like misspelt ones.
NOT_MISSPELT = {"mode", "models"}
# Not for Vertex, which returns texts.
ONLY_TEXT = (
    "stream",
    "details",
    "decoder_input_details",
    "top_n_tokens",
    "logprobs",
    "top_logprobs",
    "tools",
)
NEEDS_HOST = "needs SAMPLING=host: this server samples on the device"
NO_PROMPT_LOGITS = "is not supported: this device gives no logits of the prompt"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
OPENAI_TOP_LOGPROBS = 20  # OpenAI's own limit
ROLES = ("system", "user", "assistant", "tool", "developer", "function")
MAX_FIELDS = 256  # each unknown one is compared with all known ones, to find misspelt ones


class Job(GenerateOptions, frozen=True):
    """A checked prompt and what to generate from it."""

    prompt: str | list[int]
    sequences: int = 1
    max_new_tokens: int | None = (
        None  # None: what is left of the context length; 0: the prompt is only scored
    )
    stop: Sequence[str] = ()
    keep_stop: bool = True
    truncate: int | None = None
    add_special_tokens: bool = True
    grammar_name: str = "grammar"  # what the request calls it, for error messages
    prompt_name: str = "inputs"
    limit_name: str = "max_new_tokens"
    is_openai: bool = False
    reading: Reading = Reading()  # which parts the text of a chat has

    @property
    def characters(self) -> int:
        return len(self.prompt) if isinstance(self.prompt, str) else 0

    def sampling_of(self, sequence: int) -> Sampling:
        """Each sequence has a random stream of its own, which follows from the request's seed."""
        if sequence == 0 or self.sampling.seed is None:
            return self.sampling
        return replace(self.sampling, seed=(self.sampling.seed + sequence) & U64_MAX)


def parse(body: bytes, kind: type[T]) -> T:
    """A request body as `kind`. Raises ApiError: 400 when it is not JSON, 422 when a field has the wrong type or name."""
    with _decoding():
        request, fields = _decoders[kind].decode(body), _fields.decode(body)
        _check_names(fields, kind)
        if kind is GenerateRequest and request.parameters:
            _check_names(_fields.decode(fields["parameters"]), Parameters)
        return request


def choose(body: bytes, variants: dict[str, V]) -> V:
    """Which variant a body is: the first of `variants` whose field it has. Raises ApiError."""
    with _decoding():
        fields = _fields.decode(body)
    for name, variant in variants.items():
        if bytes(fields.get(name, b"null")) != b"null":
            return variant
    raise errors.wrong_type(
        f"data did not match any variant: one of {', '.join(f'`{name}`' for name in variants)} is needed"
    )


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    """Turns msgspec's errors into ApiErrors."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise errors.wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "validation", f"Failed to parse the request body as JSON: {error}") from None


def _check_names(fields: dict[str, Raw], kind: type[Struct]) -> None:
    """Refuses fields that are not supported, and misspelt ones; other unknown fields are ignored."""
    known = kind.__struct_fields__
    if len(fields) > MAX_FIELDS:
        raise invalid(None, f"a request must have at most {MAX_FIELDS} fields. Given: {len(fields)}")
    for name in sorted(fields):
        if name in NOT_SUPPORTED:
            value = msgspec.json.decode(fields[name])
            _require(value is None or value in NOT_SUPPORTED[name], name, "is not supported")
        elif name in known or name in NOT_MISSPELT:
            continue
        elif name in CHANGES_TEXT:
            place, usable = (
                (" in `parameters`", Parameters.__struct_fields__) if "parameters" in known else ("", known)
            )
            meant = [f"; use `{other}`{place}" for other in SAME_MEANING.get(name, [name]) if other in usable]
            _require(
                bytes(fields[name]) == b"null", name, "is not a field of this request" + "".join(meant[:1])
            )
        elif similar := difflib.get_close_matches(name[:40], known, n=1, cutoff=0.85):
            raise invalid(name[:40], f"is not a field of this request; did you mean `{similar[0]}`?")


def check(request: GenerateRequest, config: Config, info: ModelInfo, streaming: bool) -> Job:
    """Checks every field of a native request in TGI's order; raises ApiError for the first that is wrong."""
    p = request.parameters or Parameters()
    if p.seed is not None and p.seed > U64_MAX:
        raise errors.wrong_type(f"Expected `int` <= {U64_MAX} - at `$.parameters.seed`")
    if streaming:
        _require(p.best_of in (None, 1), "best_of", "!= 1 is not supported when streaming tokens")
        _require(
            not p.decoder_input_details,
            "decoder_input_details",
            "== true is not supported when streaming tokens",
        )
    # Sampling is on when asked for, or when a parameter is given that has no effect without it.
    filters = p.top_k is not None or (p.top_p or 1.0) < 1.0 or bool(p.min_p) or (p.typical_p or 1.0) < 1.0
    samples = bool(p.do_sample or p.temperature is not None or filters)
    best_of, stop, most = p.best_of or 1, p.stop or [], info.max_input_tokens
    if best_of > 1:
        _require(config.max_best_of > 1, "best_of", "!= 1 is not allowed for this endpoint")
        _check_best_of(best_of, config)
        _require(samples, "best_of", "> 1 needs sampling: set `do_sample` or `temperature`")
    _require(p.temperature is None or p.temperature > 0, "temperature", "must be strictly positive")
    _check_sampling(p)
    _require(p.typical_p is None or 0 < p.typical_p <= 1, "typical_p", "must be > 0.0 and <= 1.0")
    _require(p.top_k is None or p.top_k > 0, "top_k", "must be strictly positive")
    _require(p.max_new_tokens != 0, "max_new_tokens", "must be strictly positive")
    _check_stop(stop, config)
    _require(best_of == 1 or p.seed is None, "seed", "must not be set when `best_of` > 1")
    _check_top_n(p.top_n_tokens, "top_n_tokens", config.max_top_n_tokens)
    _require(request.inputs != "", "inputs", "cannot be empty")
    is_length = p.truncate is None or 1 <= p.truncate <= most
    _require(is_length, "truncate", f"must be strictly positive and at most {most}. Given: {p.truncate}")
    _require(info.prompt_logprobs or not p.decoder_input_details, "decoder_input_details", NO_PROMPT_LOGITS)
    sampling = _sampling(p, samples)
    _check_device(info, p, sampling, best_of=best_of > 1, top_n_tokens=p.top_n_tokens)
    job = Job(
        prompt=request.inputs,
        sampling=sampling,
        sequences=best_of,
        max_new_tokens=p.max_new_tokens,
        stop=stop,
        truncate=p.truncate,
        top_n_tokens=p.top_n_tokens or 0,
        prompt_logprobs=bool(p.decoder_input_details),
        keep_eos=bool(
            p.details or p.decoder_input_details or p.top_n_tokens
        ),  # the client gets single tokens
    )
    return with_grammar(job, *formats.of_native(p), info)


def with_grammar(job: Job, name: str, grammar: str, info: ModelInfo) -> Job:
    """The job with the grammar that the field `name` asks for; an empty one changes nothing. Raises ApiError."""
    if not grammar:
        return job
    _require(info.sampling == "host", name, NEEDS_HOST)
    _require(len(grammar) <= MAX_GRAMMAR, name, f"makes a grammar of more than {MAX_GRAMMAR} characters")
    _require(not job.ignore_eos, "ignore_eos", f"cannot be combined with `{name}`, which ends the text")
    return replace(job, grammar=grammar, grammar_name=name)


def check_chat(request: ChatRequest, config: Config, info: ModelInfo) -> Job:
    """Checks a chat request; raises ApiError. The job's prompt is empty: the chat template writes it."""
    _require(request.logprobs or not request.top_logprobs, "top_logprobs", "needs `logprobs` to be true")
    limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(request, limit_name)
    _require(limit != 0, limit_name, "must be strictly positive")
    count, most = len(request.messages), info.max_input_tokens
    limits = f"each takes a token at least, and a prompt may have {most} (--max-input-tokens raises it)"
    _require(count <= most, "messages", f"holds {count}: {limits}")
    job = _check_openai(request, "", limit, bool(request.logprobs), config, info)
    _check_top_n(request.top_logprobs, "top_logprobs", max(OPENAI_TOP_LOGPROBS, config.max_top_n_tokens))
    job = replace(
        job,
        top_n_tokens=request.top_logprobs or 0,
        add_special_tokens=False,  # the template writes them
        prompt_name="messages",
        limit_name=limit_name,
    )
    return with_grammar(job, *formats.of_openai(request), info)


def check_completion(request: CompletionRequest, config: Config, info: ModelInfo) -> list[Job]:
    """Checks a completion request. Returns a job for each of its prompts; raises ApiError."""
    prompts = _prompts(request.prompt)
    _check_batch(len(prompts), "prompts", "prompt", config)
    if request.suffix:
        what = "Suffix is not supported and can be achieved by preprocessing the prompt."
        raise ApiError(422, "suffix not supported", what, param="suffix")
    n, wants_logprobs = request.n or 1, request.logprobs is not None
    best_of = request.best_of or n
    if best_of != n:
        _require(not request.stream, "best_of", "> `n` is not supported when streaming tokens")
        _require(best_of > n, "best_of", f"must be >= `n`. Given: {best_of} and {n}")
        _check_best_of(best_of, config)
    scores = request.max_tokens != 0 or request.echo
    _require(scores, "max_tokens", "must be strictly positive, unless `echo` asks for the prompt alone")
    _check_top_n(request.logprobs, "logprobs", config.max_top_n_tokens)
    prompt_logprobs = bool(request.echo) and wants_logprobs
    _require(info.prompt_logprobs or not prompt_logprobs, "logprobs", f"with `echo` {NO_PROMPT_LOGITS}")
    jobs, grammar = [], formats.of_openai(request)
    for prompt in prompts:
        _require(len(prompt) > 0, "prompt", "cannot be empty")
        if isinstance(prompt, list):
            _check_ids(prompt, "prompt", info)
        job = _check_openai(
            request, prompt, request.max_tokens, wants_logprobs, config, info, best_of=best_of > n
        )
        wanted = {"top_n_tokens": request.logprobs or 0, "prompt_logprobs": prompt_logprobs}
        job = replace(job, sequences=best_of, logprobs=wants_logprobs or best_of > n, **wanted)
        jobs.append(with_grammar(job, *grammar, info))
    return jobs


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """OpenAI's four forms of a prompt as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise errors.wrong_type(
            "Empty array detected. Do not use an empty array for the prompt. - at `$.prompt`"
        )
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise errors.wrong_type(
            "Expected strings, token ids or arrays of token ids, not a mixture - at `$.prompt`"
        )
    return [prompt] if kinds == {int} else prompt


def _check_openai(
    request: schema.OpenAIRequest,
    prompt: str | list[int],
    limit: int | None,
    logprobs: bool,
    config: Config,
    info: ModelInfo,
    **host_only: Any,
) -> Job:
    """Checks the fields that chat and completion requests share. They sample unless the temperature is 0, as OpenAI's do."""
    n, most = 1 if request.n is None else request.n, config.max_client_batch_size
    _require(
        1 <= n <= most, "n", f"must be > 0 and <= {most} (--max-client-batch-size raises it). Given: {n}"
    )
    _require(request.temperature is None or request.temperature >= 0, "temperature", "must be >= 0.0")
    _check_sampling(request)
    _require(request.top_k is None or request.top_k >= -1, "top_k", "must be >= -1")
    _require(-2 <= (request.presence_penalty or 0) <= 2, "presence_penalty", "must be >= -2.0 and <= 2.0")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    _check_stop(stop, config)
    min_tokens = request.min_tokens or 0
    fits = limit is None or min_tokens <= limit
    _require(fits, "min_tokens", f"must be <= the limit of generated tokens. Given: {min_tokens} and {limit}")
    logit_bias = _logit_bias(request.logit_bias or {}, info)
    sampling = _sampling(request, samples=request.temperature != 0, logit_bias=logit_bias)
    host_only |= {
        "logprobs": logprobs,
        "min_tokens": min_tokens,
        "logit_bias": any(bias for _token, bias in logit_bias),
    }
    _check_device(info, request, sampling, **host_only)
    return Job(
        prompt=prompt,
        sampling=sampling,
        sequences=n,
        max_new_tokens=limit,
        min_new_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop=stop,
        keep_stop=False,
        logprobs=logprobs,
        keep_eos=logprobs,
        prompt_name="prompt",
        limit_name="max_tokens",
        is_openai=True,
    )


def _logit_bias(given: dict[str, float], info: ModelInfo) -> list[tuple[int, float]]:
    _require(
        len(given) <= MAX_LOGIT_BIAS,
        "logit_bias",
        f"takes up to {MAX_LOGIT_BIAS} tokens. Given: {len(given)}",
    )
    for token, bias in given.items():
        is_id = token.isascii() and token.isdigit() and len(token) <= 10
        _require(is_id, "logit_bias", f"maps token ids to numbers. Given: {token[:40]!r}")
        _require(-100 <= bias <= 100, "logit_bias", f"must be >= -100 and <= 100. Given: {bias}")
    biases = {int(token): bias for token, bias in given.items()}
    _check_ids(list(biases), "logit_bias", info)
    return list(biases.items())


def messages_of(messages: list[schema.Message], template_words: Collection[str] = ()) -> list[dict[str, Any]]:
    """Messages as a chat template reads them, the content of each as one text. Raises ApiError.

    A role is one of ROLES, or a word that the template has in quotes: templates may write any other next to control tokens.
    """
    _require(len(messages) > 0, "messages", "cannot be empty")
    for n, message in enumerate(messages):
        is_known = message.role in ROLES or message.role in template_words
        allowed = f"must be one of {', '.join(ROLES)}, or another role that the model's chat template names"
        _require(is_known, f"messages[{n}].role", f"{allowed}. Given: {message.role[:40]!r}")
    return [_message(n, message) for n, message in enumerate(messages)]


def _message(n: int, message: schema.Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        for i, part in enumerate(content):
            name = f"messages[{n}].content[{i}]"
            _require(part.type == "text", f"{name}.type", f"{part.type[:40]} is not supported, only text is")
            _require(part.text is not None, name, "needs `text`")
        content = "".join(part.text for part in content)
    _require(content is not None or message.tool_calls, f"messages[{n}]", "needs `content`")
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    if message.tool_calls:
        optional["tool_calls"] = [_with_arguments(call) for call in message.tool_calls]
    given = {name: value for name, value in optional.items() if value is not None}
    return {"role": message.role, "content": content or "", **given}


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI sends them as JSON in a string, templates expect the object."""
    function = call.get("function")
    if isinstance(function, dict) and isinstance(arguments := function.get("arguments") or "{}", str):
        try:
            return call | {"function": function | {"arguments": json.loads(arguments)}}
        except (ValueError, RecursionError):
            pass
    return call


def vertex_instances(request: schema.VertexRequest, config: Config) -> list[GenerateRequest | ChatRequest]:
    """The instances of a Vertex request, each parsed as a native or a chat request. Raises ApiError."""
    if not request.instances:
        raise ApiError(422, "Input validation error", "Input validation error: `instances` cannot be empty")
    _check_batch(len(request.instances), "instances", "instances", config)
    kinds = {"inputs": GenerateRequest, "messages": ChatRequest}
    instances = [parse(body, choose(body, kinds)) for body in request.instances]
    for instance in instances:
        for name in ONLY_TEXT:
            asked = getattr(instance, name, None) or getattr(
                getattr(instance, "parameters", None), name, None
            )
            _require(not asked, name, "is not supported in `instances`: a prediction is a text")
        _require((getattr(instance, "n", None) or 1) == 1, "n", "!= 1 is not supported in `instances`")
    return instances


def check_sequences(jobs: Sequence[Job], config: Config) -> None:
    """Refuses a request that asks for more sequences than may run and wait at all: it could never be accepted."""
    asked, most = sum(job.sequences for job in jobs), config.max_concurrent_requests
    if asked > most:
        limit = f"at most {most} may run and wait (--max-concurrent-requests)"
        raise invalid(None, f"the request asks for {asked} sequences, and {limit}")


def _require(holds: bool | Any, param: str, detail: str) -> None:
    if not holds:
        raise invalid(param, detail)


def _check_batch(count: int, what: str, param: str, config: Config) -> None:
    if count > config.max_client_batch_size:
        limit = f"Number of {what} exceeds the maximum allowed batch size of {config.max_client_batch_size}"
        given = f"{limit} (--max-client-batch-size raises it). Given: {count}"
        raise ApiError(422, "batch size exceeded", given, param=param)


def _check_best_of(best_of: int, config: Config) -> None:
    _require(
        best_of <= config.max_best_of, "best_of", f"must be > 0 and <= {config.max_best_of}. Given: {best_of}"
    )


def _check_sampling(p: SamplingFields) -> None:
    """The limits that native and OpenAI requests share. Unlike TGI, `top_p` may be 1.0, which clients send for no filter."""
    _require(
        p.repetition_penalty is None or p.repetition_penalty > 0,
        "repetition_penalty",
        "must be strictly positive",
    )
    _require(
        p.frequency_penalty is None or -2 <= p.frequency_penalty <= 2,
        "frequency_penalty",
        "must be >= -2.0 and <= 2.0",
    )
    _require(p.top_p is None or 0 < p.top_p <= 1, "top_p", "must be > 0.0 and <= 1.0")
    _require(p.min_p is None or 0 <= p.min_p <= 1, "min_p", "must be >= 0.0 and <= 1.0")


def _check_stop(stop: list[str], config: Config) -> None:
    most = config.max_stop_sequences
    _require(len(stop) <= most, "stop", f"supports up to {most} stop sequences. Given: {len(stop)}")


def _check_top_n(n: int | None, name: str, most: int) -> None:
    _require((n or 0) <= most, name, f"must be >= 0 and <= {most}. Given: {n}")


def _check_device(info: ModelInfo, p: SamplingFields, sampling: Sampling, **host_only: Any) -> None:
    """Where the device samples, refuses what only the host can do. A greedy request may have a seed, `min_p` and `top_k`: they
    do nothing."""
    if info.sampling == "host":
        return
    samples, neutral = sampling.seed is not None, Sampling()
    host_only |= {"seed": samples and p.seed is not None, "min_p": samples and p.min_p}
    for name in ("typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        host_only[name] = getattr(sampling, name) != getattr(neutral, name)
    for name, asked in host_only.items():
        _require(not asked, name, NEEDS_HOST)
    few = not samples or (p.top_k or 0) <= DEVICE_TOP_K
    _require(few, "top_k", f"above {DEVICE_TOP_K} {NEEDS_HOST}. Given: {p.top_k}")


def _check_ids(ids: list[int], name: str, info: ModelInfo) -> None:
    size = info.vocab_size
    unknown = next((token for token in ids if not 0 <= token < size), None)
    _require(
        unknown is None,
        name,
        f"holds token {unknown}, but the model's vocabulary has the tokens 0 to {size - 1}",
    )


def _sampling(p: SamplingFields, samples: bool, **more: Any) -> Sampling:
    """Without a seed in it, the most likely token is taken at each step."""
    seed = secrets.randbits(64) if p.seed is None else p.seed & U64_MAX  # OpenAI's may be negative
    given = {name: getattr(p, name, None) for name in Sampling.__struct_fields__} | more
    given |= {"seed": seed if samples else None, "temperature": p.temperature or None}
    given["top_k"] = max(p.top_k or 0, 0)  # vLLM's -1 and 0: all tokens
    return Sampling(**{name: value for name, value in given.items() if value is not None})


def fit(job: Job, prompt: list[int], info: ModelInfo) -> tuple[list[int], int]:
    """The prompt to run (its last `truncate` tokens if asked for) and how many tokens may follow it.

    Raises ApiError with the numbers when the two exceed the context length.
    """
    if job.truncate is not None:
        prompt = prompt[-job.truncate :]
    length, window = len(prompt), info.max_total_tokens
    max_new_tokens = window - length if job.max_new_tokens is None else job.max_new_tokens
    if length + max_new_tokens > window and job.max_new_tokens is not None:
        tokens = f"{length} `{job.prompt_name}` tokens and {max_new_tokens} `{job.limit_name}`"
        raise _too_long(job, f"tokens + `{job.limit_name}` must be <= {window}. Given: {tokens}", info)
    if length > info.max_input_tokens:
        raise too_many_tokens(job, f"{length}", info)
    _require(length > 0, job.prompt_name, "cannot be empty")
    _check_ids([max(prompt)], job.prompt_name, info)
    return prompt, max(
        max_new_tokens, 1
    )  # a prompt that is only scored runs with one token, which is dropped


def too_many_tokens(job: Job, given: str, info: ModelInfo) -> ApiError:
    return _too_long(job, f"must have at most {info.max_input_tokens} tokens. Given: {given}", info)


def _too_long(job: Job, detail: str, info: ModelInfo) -> ApiError:
    if not job.is_openai:
        return invalid(job.prompt_name, detail, CONTEXT_LENGTH_EXCEEDED)
    # OpenAI's status and code, and the words that clients such as LangChain look for.
    what = (
        f"This model's maximum context length is {info.max_total_tokens} tokens: `{job.prompt_name}` {detail}"
    )
    return ApiError(400, CONTEXT_LENGTH_EXCEEDED, what, code=CONTEXT_LENGTH_EXCEEDED, param=job.prompt_name)
