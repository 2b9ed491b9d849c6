"""A checked prompt and what to generate from it, for the model that is served.

Every API turns a request into `PreparedRequest`s. Here a job's prompt becomes token ids, and is checked
against the context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from api.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, invalid
from api.fields import NEEDS_HOST, check_ids, require
from api.types import U64_MAX
from config import Config
from protocol import MAX_GRAMMAR, GenerateOptions, ModelInfo, Sampling
from text.grammar import GrammarChecker
from text.reader import OutputFormat
from text.template import ChatTemplate
from text.tokenizer import Tokenizer
from text.tool_formats import AS_TEXT, ModelTools
from text.traits import TemplateCapabilities


class ModelText(NamedTuple):
    """The served model's tokenizer and chat template, and what they say about tools and grammars."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    grammars: GrammarChecker
    tools: ModelTools
    traits: TemplateCapabilities

    @property
    def tools_note(self) -> str:
        """A note about tools for the startup log; "": none."""
        if self.template is None or not self.tools.in_prompt or self.tools.format is AS_TEXT:
            return ""
        return (
            "the chat template has no place for tools: the system message describes them, and calls are read "
            f"as {self.tools.format.name} (--tool-parser none rejects tools)"
        )

    @classmethod
    def load(cls, info: ModelInfo, config: Config) -> ModelText:
        template = ChatTemplate.load(info.model_dir, config.tokenizer_config_path)
        traits = TemplateCapabilities.of(template) if template else TemplateCapabilities()
        grammars = GrammarChecker(info.tokenizer_dir, info.vocab_size, info.eos_token_ids)
        tokenizer = Tokenizer(info.tokenizer_dir, info.eos_token_ids, config.escape_special_tokens)
        tools = ModelTools.of(template, traits.tools, tokenizer, config.tool_parser)
        return cls(tokenizer, template, grammars, tools, traits)


@dataclass(frozen=True)
class Served:
    """What requests are checked against: the settings, the served model and its text."""

    config: Config
    info: ModelInfo
    text: ModelText


class PreparedRequest(GenerateOptions, frozen=True):
    """A checked prompt and what to generate from it."""

    prompt: str | list[int]
    sequences: int = 1
    max_new_tokens: int | None = None  # None: what is left of the context; 0: the prompt is only scored
    stop: Sequence[str] = ()
    keep_stop: bool = True
    truncate: int | None = None
    add_special_tokens: bool = True
    grammar_name: str = "grammar"  # what the request calls it, for error messages
    prompt_name: str = "inputs"
    limit_name: str = "max_new_tokens"
    # OpenAI's and Anthropic's: `max_new_tokens` is clamped to the rest of the context.
    clamps_max_tokens: bool = False
    reading: OutputFormat = OutputFormat()  # which parts the text of a chat has

    @property
    def characters(self) -> int:
        return len(self.prompt) if isinstance(self.prompt, str) else 0

    def sampling_of(self, sequence: int) -> Sampling:
        """Each sequence has a random stream of its own, which follows from the request's seed."""
        if sequence == 0 or self.sampling.seed is None:
            return self.sampling
        return replace(self.sampling, seed=(self.sampling.seed + sequence) & U64_MAX)


class TokenizedPrompt(NamedTuple):
    """The prompt of a job as it runs."""

    job: PreparedRequest
    ids: list[int]
    max_new_tokens: int


def with_grammar(job: PreparedRequest, name: str, grammar: str, info: ModelInfo) -> PreparedRequest:
    """The job with the grammar that the field `name` asks for; an empty one changes nothing. Raises
    ApiError."""
    if not grammar:
        return job
    require(info.sampling != "device", name, NEEDS_HOST)
    require(len(grammar) <= MAX_GRAMMAR, name, f"makes a grammar of more than {MAX_GRAMMAR} characters")
    require(not job.ignore_eos, "ignore_eos", f"cannot be combined with `{name}`, which ends the text")
    return replace(job, grammar=grammar, grammar_name=name)


def prompts_of(jobs: list[PreparedRequest], served: Served) -> list[TokenizedPrompt]:
    """The prompts of a request in token ids. Raises ApiError for what cannot run."""
    asked = sum(job.sequences for job in jobs)
    most = served.config.max_concurrent_requests
    if asked > most:  # it could never be accepted
        limit = f"at most {most} may run and wait (--max-concurrent-requests)"
        raise invalid(None, f"the request asks for {asked} sequences, and {limit}")
    return [_fit(job, ids_of(job, served), served.info) for job in jobs]


def ids_of(job: PreparedRequest, served: Served) -> list[int]:
    """The tokens of a prompt. Raises ApiError for a text that cannot be tokenized, or is far too long."""
    if not isinstance(job.prompt, str):
        return job.prompt
    tokenizer = served.text.tokenizer
    # Tokenizing a text takes a hundred times its memory, so one that cannot fit is rejected before.
    if job.truncate is None and len(job.prompt) > served.info.max_total_tokens * tokenizer.longest_token:
        raise _too_many_tokens(job, f"at least {len(job.prompt) // tokenizer.longest_token}", served.info)
    is_written_by_template = not job.add_special_tokens
    text = job.prompt if is_written_by_template else tokenizer.escape(job.prompt)
    try:
        return tokenizer.encode(text, job.add_special_tokens)
    except Exception as error:
        raise invalid(None, f"tokenizer error: {error}") from None


def _fit(job: PreparedRequest, ids: list[int], info: ModelInfo) -> TokenizedPrompt:
    """The prompt to run (its last `truncate` tokens if asked for) and how many tokens may follow it.

    Raises ApiError with the numbers when the two exceed the context length.
    """
    if job.truncate is not None:
        ids = ids[-job.truncate :]
    length = len(ids)
    window = info.max_total_tokens
    most = window - length if job.max_new_tokens is None else job.max_new_tokens
    if job.clamps_max_tokens:
        most = min(most, window - length)
    elif length + most > window and job.max_new_tokens is not None:
        tokens = f"{length} `{job.prompt_name}` tokens and {most} `{job.limit_name}`"
        detail = (
            f"tokens + `{job.limit_name}` must be <= {window} (--max-total-tokens raises it). Given: {tokens}"
        )
        raise invalid(job.prompt_name, detail, CONTEXT_LENGTH_EXCEEDED)
    if length > info.max_input_tokens:
        raise _too_many_tokens(job, f"{length}", info)
    require(length > 0, job.prompt_name, "cannot be empty")
    check_ids([max(ids)], job.prompt_name, info)
    # A prompt that is only scored runs with one token, which is dropped.
    return TokenizedPrompt(job, ids, max(most, 1))


def _too_many_tokens(job: PreparedRequest, given: str, info: ModelInfo) -> ApiError:
    limit = f"must have at most {info.max_input_tokens} tokens"
    if not job.clamps_max_tokens:
        detail = f"{limit} (--max-input-tokens raises it). Given: {given}"
        return invalid(job.prompt_name, detail, CONTEXT_LENGTH_EXCEEDED)
    # OpenAI's status and code, and the words that clients such as LangChain look for.
    window = f"This model's maximum context length is {info.max_total_tokens} tokens"
    what = f"{window} (--max-total-tokens raises it): `{job.prompt_name}` {limit}. Given: {given}"
    return ApiError(400, CONTEXT_LENGTH_EXCEEDED, what, code=CONTEXT_LENGTH_EXCEEDED, param=job.prompt_name)
