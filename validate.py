"""From the body of a request to `Job`s: the rules of every field.

A body is parsed into its type (schema.py), checked in TGI's order, and comes out as `Job`s: what to generate, with nothing
left to doubt. The only place that knows a field's rule. It knows neither Flask nor ZeroMQ.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

import errors
from config import DEVICE_TOP_K, Config
from errors import ApiError, invalid
from protocol import ModelInfo, Sampling
from schema import (
    U64_MAX,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    InvocationRequest,
    Message,
    OpenAIRequest,
    Parameters,
    VertexRequest,
)

# Made here, where there is one thread: several that make msgspec learn a type at the same time bring the process down (0.22.0).
_decoders = {
    kind: msgspec.json.Decoder(kind)
    for kind in (GenerateRequest, ChatRequest, CompletionRequest, InvocationRequest, VertexRequest)
}
_names = msgspec.json.Decoder(dict[str, msgspec.Raw])
T = TypeVar("T", bound=Struct)
# Fields of other servers that change what is generated, with the value that asks for nothing.
NOT_SUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema")),
    **dict.fromkeys(("allowed_token_ids", "logits_processors", "prompt_logprobs", "truncate_prompt_tokens", "max_length")),
    **dict.fromkeys(("chat_template", "documents", "max_tokens_to_sample", "n_predict", "num_predict", "min_length")),
    **{"stop_token_ids": [], "bad_words": [], "chat_template_kwargs": {}, "add_generation_prompt": True},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False},
    **{"continue_final_message": False, "use_beam_search": False, "early_stopping": False, "num_beams": 1},
    **{"length_penalty": 1.0, "repeat_penalty": 1.0, "no_repeat_ngram_size": 0, "mirostat": 0, "tfs_z": 1.0, "top_a": 0},
    **{"epsilon_cutoff": 0, "eta_cutoff": 0, "dry_multiplier": 0, "xtc_probability": 0, "dynatemp_range": 0},
}
NO_PROMPT_LOGITS = "is not supported: this device gives no logits of the prompt"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
OPENAI_TOP_LOGPROBS = 20  # OpenAI's own limit


def parse(body: bytes, kind: type[T]) -> T:
    """A request body as `kind`. Raises ApiError: 400 when it is no JSON, 422 when a field has the wrong type."""
    try:
        request = _decoders[kind].decode(body)
        names = _names.decode(body)
        _check_names(names, kind)
        if kind is GenerateRequest and request.parameters:
            _check_names(_names.decode(names["parameters"]), Parameters)
        return request
    except msgspec.ValidationError as error:
        raise errors.wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "validation", f"Failed to parse the request body as JSON: {error}") from None


def _check_names(given: dict[str, msgspec.Raw], kind: type[Struct]) -> None:
    """Refuses fields of other servers that ask for something, and what looks like a misspelt field; others are ignored."""
    for name in sorted(given.keys() - set(kind.__struct_fields__)):
        if name in NOT_SUPPORTED:
            value = msgspec.json.decode(given[name])
            _require(value is None or value == NOT_SUPPORTED[name], name, "is not supported")
            continue
        for known in kind.__struct_fields__:
            is_typo = _distance(name, known) <= (2 if len(known) >= 8 else 1)
            _require(not is_typo, name[:40], f"is not a field of this request; did you mean `{known}`?")


def _distance(a: str, b: str) -> int:
    """How many characters to insert, delete or replace (Levenshtein)."""
    if abs(len(a) - len(b)) > 2:
        return 3
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (x != y)))
    return row[-1]


@dataclass(frozen=True)
class Job:
    """A checked prompt: what to generate from it. `max_new_tokens` None: what is left of the window; 0: the prompt is only
    scored. The names are those that its route has for prompt and limit, so that an error speaks the client's language."""

    prompt: str | list[int]
    sampling: Sampling
    sequences: int = 1
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    keep_stop: bool = True
    truncate: int | None = None
    add_special_tokens: bool = True
    top_n_tokens: int = 0
    logprobs: bool = True
    prompt_logprobs: bool = False
    prompt_name: str = "inputs"
    limit_name: str = "max_new_tokens"
    is_openai: bool = False

    @property
    def characters(self) -> int:
        return len(self.prompt) if isinstance(self.prompt, str) else 0

    def sampling_of(self, sequence: int) -> Sampling:
        """Each sequence has a random stream of its own, which the request's seed decides."""
        if sequence == 0 or self.sampling.seed is None:
            return self.sampling
        return msgspec.structs.replace(self.sampling, seed=(self.sampling.seed + sequence) & U64_MAX)


def check(request: GenerateRequest, config: Config, facts: ModelInfo, streaming: bool) -> Job:
    """Checks every field of a native request in TGI's order; the first that fails is raised as an ApiError."""
    p = request.parameters or Parameters()
    if p.seed is not None and p.seed > U64_MAX:
        raise errors.wrong_type(f"Expected `int` <= {U64_MAX} - at `$.parameters.seed`")
    if streaming:
        _require(p.best_of in (None, 1), "best_of", "!= 1 is not supported when streaming tokens")
        _require(not p.decoder_input_details, "decoder_input_details", "== true is not supported when streaming tokens")
    best_of = p.best_of or 1
    if best_of > 1:
        _require(config.max_best_of > 1, "best_of", "!= 1 is not allowed for this endpoint")
        _require(best_of <= config.max_best_of, "best_of", f"must be > 0 and <= {config.max_best_of}. Given: {best_of}")
        _require(_samples(p), "best_of", "> 1 needs sampling: set `do_sample` or `temperature`")
    _check_sampling(p)
    _require(p.max_new_tokens != 0, "max_new_tokens", "must be strictly positive")
    stop = p.stop or []
    _check_stop(stop, config)
    _require(best_of == 1 or p.seed is None, "seed", "must not be set when `best_of` > 1")
    _check_top_n(p.top_n_tokens, "top_n_tokens", config.max_top_n_tokens)
    _require(request.inputs != "", "inputs", "cannot be empty")
    _require(
        p.truncate is None or 1 <= p.truncate <= facts.max_input_tokens,
        "truncate",
        f"must be strictly positive and at most {facts.max_input_tokens}. Given: {p.truncate}",
    )
    # What TGI knows and this server does not do; asking for nothing with them is fine.
    _require(not p.grammar, "grammar", "is not supported")
    _require(not p.watermark, "watermark", "is not supported")
    _require(not p.adapter_id, "adapter_id", "is not supported")
    _require(facts.prompt_logprobs or not p.decoder_input_details, "decoder_input_details", NO_PROMPT_LOGITS)
    _check_for_device(p, _samples(p), facts)
    _require_host(facts, best_of=best_of > 1, top_n_tokens=p.top_n_tokens)
    return Job(
        prompt=request.inputs,
        sampling=_sampling(p),
        sequences=best_of,
        max_new_tokens=p.max_new_tokens,
        stop=stop,
        truncate=p.truncate,
        top_n_tokens=p.top_n_tokens or 0,
        prompt_logprobs=bool(p.decoder_input_details),
    )


def check_sentence(sentence: str, config: Config, facts: ModelInfo) -> Job:
    """Checks what `GET /infer` is asked. Raises ApiError."""
    _require(sentence != "", "sentence", "cannot be empty")
    return replace(check(GenerateRequest(sentence), config, facts, streaming=False), prompt_name="sentence")


def check_chat(request: ChatRequest, config: Config, facts: ModelInfo) -> Job:
    """Checks a chat request. Raises ApiError. The prompt of the job is for the chat template to make."""
    for name, asks in (
        ("tools", request.tools),
        ("functions", request.functions),
        ("tool_choice", request.tool_choice not in (None, "none", "auto")),
        ("function_call", request.function_call not in (None, "none", "auto")),
        ("response_format", ((request.response_format or {}).get("type") or "text") != "text"),
        ("modalities", set(request.modalities or ()) - {"text"}),
        ("audio", request.audio),
        ("web_search_options", request.web_search_options is not None),
    ):
        _require(not asks, name, "is not supported")
    _require(request.logprobs or not request.top_logprobs, "top_logprobs", "needs `logprobs` to be true")
    limits = {"max_completion_tokens": request.max_completion_tokens, "max_tokens": request.max_tokens}
    limit_name = next((name for name, value in limits.items() if value is not None), "max_tokens")
    _require(limits[limit_name] != 0, limit_name, "must be strictly positive")
    most = facts.max_input_tokens
    held = f"each takes a token at least, and a prompt may have {most} (--max-input-tokens raises it)"
    _require(len(request.messages) <= most, "messages", f"holds {len(request.messages)}: {held}")
    job = _check_openai(request, "", limits[limit_name], config, facts)
    _check_top_n(request.top_logprobs, "top_logprobs", max(OPENAI_TOP_LOGPROBS, config.max_top_n_tokens))
    _require_host(facts, logprobs=request.logprobs)
    return replace(
        job,
        top_n_tokens=request.top_logprobs or 0,
        logprobs=bool(request.logprobs),
        add_special_tokens=False,  # the template has put them where they belong
        prompt_name="messages",
        limit_name=limit_name,
    )


def check_completion(request: CompletionRequest, config: Config, facts: ModelInfo) -> list[Job]:
    """Checks a completion request. Returns a job for each of its prompts; raises ApiError."""
    prompts = _prompts(request.prompt)
    if len(prompts) > config.max_client_batch_size:
        limit = f"Number of prompts exceeds the maximum allowed batch size of {config.max_client_batch_size}"
        given = f"{limit} (--max-client-batch-size raises it). Given: {len(prompts)}"
        raise ApiError(422, "batch size exceeded", given, param="prompt")
    if request.suffix:
        what = "Suffix is not supported and can be achieved by preprocessing the prompt."
        raise ApiError(422, "suffix not supported", what, param="suffix")
    n, best_of = _n(request, config), request.best_of or request.n or 1
    if best_of != n:
        _require(not request.stream, "best_of", "> `n` is not supported when streaming tokens")
        _require(best_of > n, "best_of", f"must be >= `n`. Given: {best_of} and {n}")
        _require(best_of <= config.max_best_of, "best_of", f"must be > 0 and <= {config.max_best_of}. Given: {best_of}")
    _require(
        request.max_tokens != 0 or request.echo,
        "max_tokens",
        "must be strictly positive, unless `echo` asks for the prompt alone",
    )
    _check_top_n(request.logprobs, "logprobs", config.max_top_n_tokens)
    prompt_logprobs = bool(request.echo) and request.logprobs is not None
    _require(facts.prompt_logprobs or not prompt_logprobs, "logprobs", f"with `echo` {NO_PROMPT_LOGITS}")
    _require_host(facts, logprobs=request.logprobs is not None, best_of=best_of > n)
    jobs = []
    for prompt in prompts:
        _require(len(prompt) > 0, "prompt", "cannot be empty")
        if isinstance(prompt, list):
            _check_ids(prompt, "prompt", facts)
        job = _check_openai(request, prompt, request.max_tokens, config, facts)
        wanted = {"top_n_tokens": request.logprobs or 0, "prompt_logprobs": prompt_logprobs}
        jobs.append(replace(job, sequences=best_of, logprobs=request.logprobs is not None or best_of > n, **wanted))
    return jobs


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """OpenAI's four forms of a prompt as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise errors.wrong_type("Empty array detected. Do not use an empty array for the prompt. - at `$.prompt`")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise errors.wrong_type("Expected strings, token ids or arrays of token ids, not a mixture - at `$.prompt`")
    return [prompt] if kinds == {int} else prompt


def _n(request: OpenAIRequest, config: Config) -> int:
    most, n = config.max_client_batch_size, 1 if request.n is None else request.n
    _require(1 <= n <= most, "n", f"must be > 0 and <= {most} (--max-client-batch-size raises it). Given: {n}")
    return n


def _check_openai(request: OpenAIRequest, prompt: str | list[int], limit: int | None, config: Config, facts: ModelInfo) -> Job:
    """What chat and completions have in common. They sample unless the temperature is 0, as OpenAI's do."""
    greedy = request.temperature == 0
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    p = Parameters(
        temperature=None if greedy else request.temperature,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty,
        top_k=None if request.top_k in (-1, 0) else request.top_k,  # how other servers say: all
        top_p=request.top_p,
        min_p=request.min_p,
        do_sample=not greedy,
        seed=None if request.seed is None else request.seed & U64_MAX,  # OpenAI's may be negative
    )
    n = _n(request, config)
    _require(request.temperature is None or request.temperature >= 0, "temperature", "must be >= 0.0")
    _check_sampling(p)
    _require(
        request.presence_penalty is None or -2 <= request.presence_penalty <= 2,
        "presence_penalty",
        "must be >= -2.0 and <= 2.0",
    )
    _check_stop(stop, config)
    min_tokens = request.min_tokens or 0
    _require(
        limit is None or min_tokens <= limit,
        "min_tokens",
        f"must be <= the most tokens that may follow the prompt. Given: {min_tokens} and {limit}",
    )
    logit_bias = _logit_bias(request.logit_bias or {}, facts)
    _check_for_device(p, not greedy, facts)
    biased = any(bias for _token, bias in logit_bias)
    _require_host(facts, presence_penalty=request.presence_penalty, logit_bias=biased, min_tokens=min_tokens)
    sampling = _sampling(p)
    if greedy:
        sampling = msgspec.structs.replace(sampling, seed=None)
    return Job(
        prompt=prompt,
        sampling=msgspec.structs.replace(
            sampling,
            presence_penalty=request.presence_penalty or 0.0,
            logit_bias=logit_bias,
        ),
        sequences=n,
        max_new_tokens=limit,
        min_new_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop=stop,
        keep_stop=False,
        prompt_name="prompt",
        limit_name="max_tokens",
        is_openai=True,
    )


MAX_TOLD_TOKENS = 100_000  # of /tokenize: an answer of 4 MB


def check_sequences(jobs: Sequence[Job], config: Config) -> None:
    """A request is taken as a whole or not at all; one that could never be taken is not told to come back."""
    asked, most = sum(job.sequences for job in jobs), config.max_concurrent_requests
    if asked > most:
        limit = f"at most {most} may run and wait (--max-concurrent-requests)"
        raise invalid(None, f"the request asks for {asked} sequences, and {limit}")


MAX_LOGIT_BIAS = 1024  # tokens: more would cost more than the step


def _logit_bias(given: dict[str, float], facts: ModelInfo) -> list[tuple[int, float]]:
    for token, bias in given.items():
        is_id = token.isascii() and token.isdigit() and len(token) <= 10
        _require(is_id, "logit_bias", f"maps token ids to numbers. Given: {token[:40]!r}")
        _require(-100 <= bias <= 100, "logit_bias", f"must be >= -100 and <= 100. Given: {bias}")
    _require(len(given) <= MAX_LOGIT_BIAS, "logit_bias", f"takes up to {MAX_LOGIT_BIAS} tokens. Given: {len(given)}")
    biases = {int(token): bias for token, bias in given.items()}
    _check_ids(list(biases), "logit_bias", facts)
    return list(biases.items())


def messages_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as a chat template reads them, each content a text. Raises ApiError for what is none."""
    _require(len(messages) > 0, "messages", "cannot be empty")
    return [_message(n, message) for n, message in enumerate(messages)]


def _message(n: int, message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        for part in content:
            _require(part.type == "text", f"messages[{n}].content", f"{part.type[:40]} is not supported, only text is")
            _require(part.text is not None, f"messages[{n}].content", "a text part needs `text`")
        content = "".join(part.text for part in content)
    _require(content is not None or message.tool_calls, f"messages[{n}]", "needs `content`")
    told = {"role": message.role, "content": content or ""}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            told[name] = getattr(message, name)
    if message.tool_calls:
        told["tool_calls"] = [_with_arguments(call) for call in message.tool_calls]
    return told


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI sends them as JSON in a string, templates expect the object."""
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
        except (ValueError, RecursionError):
            pass
    return call


def vertex_instances(request: VertexRequest, config: Config) -> list[GenerateRequest | ChatRequest]:
    """The instances of a Vertex request, each as the request that it is. Raises ApiError."""
    if not request.instances:
        raise ApiError(422, "Input validation error", "Input validation error: `instances` cannot be empty")
    if len(request.instances) > config.max_client_batch_size:
        limit = f"Number of instances exceeds the maximum allowed batch size of {config.max_client_batch_size}"
        raise ApiError(422, "batch size exceeded", f"{limit} (--max-client-batch-size raises it)")
    kinds = {"inputs": GenerateRequest, "messages": ChatRequest}
    instances = [parse(instance, kind_of(instance, kinds)) for instance in request.instances]
    for instance in instances:
        _require(not instance.stream, "stream", "is not supported in `instances`")
        _require((getattr(instance, "n", None) or 1) == 1, "n", "!= 1 is not supported in `instances`")
    return instances


def kind_of(body: bytes, kinds: dict[str, type[Struct]]) -> type[Struct]:
    """Which of `kinds` a body is, told by the field that each of them must have. Raises ApiError."""
    told = parse(body, InvocationRequest)
    for name, kind in kinds.items():
        if getattr(told, name) is not None:
            return kind
    raise errors.wrong_type(f"data did not match any variant: one of {', '.join(f'`{name}`' for name in kinds)} is needed")


def _require(holds: bool | Any, param: str, detail: str, code: str | None = None) -> None:
    if not holds:
        raise invalid(param, detail, code)


def _check_sampling(p: Parameters) -> None:
    _require(p.temperature is None or p.temperature > 0, "temperature", "must be strictly positive")
    _require(p.repetition_penalty is None or p.repetition_penalty > 0, "repetition_penalty", "must be strictly positive")
    _require(p.frequency_penalty is None or -2 <= p.frequency_penalty <= 2, "frequency_penalty", "must be >= -2.0 and <= 2.0")
    # Unlike TGI, 1.0 is accepted: clients send it to say that nothing is filtered.
    _require(p.top_p is None or 0 < p.top_p <= 1, "top_p", "must be > 0.0 and <= 1.0")
    _require(p.min_p is None or 0 <= p.min_p <= 1, "min_p", "must be >= 0.0 and <= 1.0")
    _require(p.typical_p is None or 0 < p.typical_p <= 1, "typical_p", "must be > 0.0 and <= 1.0")
    _require(p.top_k is None or p.top_k > 0, "top_k", "must be strictly positive")


def _check_stop(stop: list[str], config: Config) -> None:
    most = config.max_stop_sequences
    _require(len(stop) <= most, "stop", f"supports up to {most} stop sequences. Given: {len(stop)}")


def _check_top_n(n: int | None, name: str, most: int) -> None:
    _require((n or 0) <= most, name, f"must be >= 0 and <= {most}. Given: {n}")


def _check_for_device(p: Parameters, samples: bool, facts: ModelInfo) -> None:
    """What a device cannot do that samples itself. A greedy text has no use for a seed or a top_k, so it may have both."""
    _require_host(
        facts,
        seed=samples and p.seed is not None,
        repetition_penalty=(p.repetition_penalty or 1.0) != 1.0,
        frequency_penalty=p.frequency_penalty,
        min_p=samples and p.min_p,
        typical_p=(p.typical_p or 1.0) < 1.0,
    )
    _require(
        facts.sampling == "host" or not samples or (p.top_k or 0) <= DEVICE_TOP_K,
        "top_k",
        f"above {DEVICE_TOP_K} needs SAMPLING=host: this server samples on the device. Given: {p.top_k}",
    )


def _require_host(facts: ModelInfo, **asked: Any) -> None:
    """Where the device samples, refuses the first parameter that is `asked` to do something."""
    for name, asks in asked.items():
        if asks and facts.sampling == "device":
            raise invalid(name, "needs SAMPLING=host: this server samples on the device")


def _check_ids(ids: list[int], name: str, facts: ModelInfo) -> None:
    for token in ids:
        _require(
            0 <= token < facts.vocab_size,
            name,
            f"holds token {token}, but the model's vocabulary has the tokens 0 to {facts.vocab_size - 1}",
        )


def _samples(p: Parameters) -> bool:
    """Sampling is on when asked for, or when a parameter is given that means nothing without it (a 1.0 that does nothing
    does not count)."""
    filters = p.top_k is not None or (p.top_p or 1.0) < 1.0 or bool(p.min_p) or (p.typical_p or 1.0) < 1.0
    return bool(p.do_sample or p.temperature is not None or filters)


def _sampling(p: Parameters) -> Sampling:
    seed = None
    if _samples(p):
        seed = p.seed if p.seed is not None else secrets.randbits(64)
    return Sampling(
        seed=seed,
        temperature=p.temperature or 1.0,
        top_k=p.top_k or 0,
        top_p=p.top_p or 1.0,
        min_p=p.min_p or 0.0,
        typical_p=p.typical_p or 1.0,
        repetition_penalty=p.repetition_penalty or 1.0,
        frequency_penalty=p.frequency_penalty or 0.0,
    )


def fit(job: Job, prompt: list[int], facts: ModelInfo) -> tuple[list[int], int]:
    """The prompt as it will be run (cut to its last `truncate` tokens if asked) and how many tokens may follow it.

    Raises ApiError when the two do not fit into the window, with the numbers.
    """
    if job.truncate is not None:
        prompt = prompt[-job.truncate :]
    length, window = len(prompt), facts.max_total_tokens
    max_new_tokens = job.max_new_tokens if job.max_new_tokens is not None else window - length
    if length + max_new_tokens > window and job.max_new_tokens is not None:
        tokens = f"{length} `{job.prompt_name}` tokens and {max_new_tokens} `{job.limit_name}`"
        raise _too_long(job, f"tokens + `{job.limit_name}` must be <= {window}. Given: {tokens}", facts)
    if length > facts.max_input_tokens:
        raise too_many_tokens(job, f"{length}", facts)
    _require(length > 0, job.prompt_name, "cannot be empty")
    _check_ids([max(prompt)], job.prompt_name, facts)
    return prompt, max(max_new_tokens, 1)  # a prompt that is only scored is run for one token, which is dropped


def too_many_tokens(job: Job, given: str, facts: ModelInfo) -> ApiError:
    return _too_long(job, f"must have at most {facts.max_input_tokens} tokens. Given: {given}", facts)


def _too_long(job: Job, detail: str, facts: ModelInfo) -> ApiError:
    if not job.is_openai:
        return invalid(job.prompt_name, detail, CONTEXT_LENGTH_EXCEEDED)
    # OpenAI's status and code, and the words that clients such as LangChain look for.
    what = f"This model's maximum context length is {facts.max_total_tokens} tokens: `{job.prompt_name}` {detail}"
    return ApiError(400, CONTEXT_LENGTH_EXCEEDED, what, code=CONTEXT_LENGTH_EXCEEDED, param=job.prompt_name)
