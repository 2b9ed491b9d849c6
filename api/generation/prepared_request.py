"""A checked prompt and what to generate from it, for the model that is served.

Every API turns a request into `PreparedRequest`s. Here a prompt becomes token ids, and is checked
against the context length.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from api.generation.request_images import NO_IMAGES, RequestImages
from api.http.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, invalid, too_large, unknown_model
from api.http.fields import check_ids, require
from api.http.response_store import OwnedResponses
from api.http.types import U64_MAX
from config import TGI_NAME, Config
from protocol import GenerateOptions, Image, ModelInfo, SamplingParams
from text.grammar import GrammarChecker
from text.images.preprocessor import ImagePreprocessor
from text.output.call_syntaxes import ModelTools
from text.output.parser import ParserConfig
from text.output.reasoning_formats import ModelReasoning
from text.output.tool_detection import model_tools
from text.output.tool_formats import AS_TEXT
from text.template import ChatTemplate
from text.template_capabilities import TemplateCapabilities
from text.tokenizer import Tokenizer


class ModelText(NamedTuple):
    """The served model's tokenizer and chat template, and what they say about grammars, tools and reasoning.

    images: None: the model reads text only.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    grammars: GrammarChecker
    tools: ModelTools
    capabilities: TemplateCapabilities
    reasoning: ModelReasoning
    images: ImagePreprocessor | None = None

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
        """Loads the text side of the served model: tokenizer, template, tool and reasoning formats and, if
        the model reads images, their preprocessor.

        The call takes seconds if the tokenizer is large. It starts child processes for templates and images,
        but not that of `grammars`, and waits until the template has rendered some twenty short chats. Raises
        ConfigError for a file that cannot be read, and for a setting that does not fit the model. A template
        that does not compile raises nothing here.
        """
        template = ChatTemplate.load(info.model_dir, config.tokenizer_config_path)
        images = None
        if info.reads_images:
            images = ImagePreprocessor(info.model_dir, config.mm_processor_options, info.max_input_tokens)
        capabilities = TemplateCapabilities()
        if template:
            capabilities = TemplateCapabilities.of(template, images.placeholder if images else "")
        grammars = GrammarChecker(info.tokenizer_dir, info.vocab_size, info.eos_token_ids)
        tokenizer = Tokenizer(
            info.tokenizer_dir,
            info.eos_token_ids,
            config.escape_special_tokens,
            images.reserved_ids if images else set(),
        )
        tools = model_tools(template, capabilities, tokenizer, config.tool_parser)
        reasoning = ModelReasoning.of(template, tokenizer, config.reasoning_parser)
        return cls(tokenizer, template, grammars, tools, capabilities, reasoning, images)


@dataclass(frozen=True)
class Served:
    """What a request is checked against: the settings, the served model and its text, the stored responses of
    the client, and the request's images."""

    config: Config
    info: ModelInfo
    text: ModelText
    responses: OwnedResponses
    images: RequestImages = NO_IMAGES
    adapter: str = ""  # the LoRA adapter that a header or a path names, before any field; "": none

    def adapter_of(self, model: str | None) -> str:
        """Returns the LoRA adapter of a request with this field `model`; "": none. Raises ApiError (404) for
        an unknown name.

        An adapter that a header or a path names counts before the field. Then the field may have any name,
        and also if no adapters are served and none can be loaded (`--lora-folder`).
        """
        has_adapters = self.info.adapters or self.config.lora_folder
        if self.adapter or not has_adapters or model in (None, "", TGI_NAME):
            return self.adapter
        return self.with_adapter(model).adapter

    def with_adapter(self, model: str) -> Served:
        """Returns the same for a request to the LoRA adapter `model`; unchanged if `model` is the name of the
        served model. Raises ApiError (404) for another name."""
        if model == self.info.model_name:
            return self
        if model not in self.info.adapters:
            served = ", ".join(map(repr, (self.info.model_name, *self.info.adapters)))
            what = f"The model {model[:80]!r} is not served here; served: {served}"
            raise unknown_model(what)
        return dataclasses.replace(self, adapter=model)


class PreparedRequest(GenerateOptions, frozen=True):
    """A checked prompt and what to generate from it. An API makes it when all fields are checked."""

    prompt: str | list[int]  # a text's special tokens are the server's: those of the client are escaped
    sequences: int = 1
    max_new_tokens: int | None = None  # None: what is left of the context; 0: the prompt is only scored
    stop: Sequence[str] = ()
    keep_stop: bool = True
    stop_token_ids: frozenset[int] = frozenset()
    truncate: int | None = None
    add_special_tokens: bool = True
    shows_special_tokens: bool = False  # in the generated text
    grammar_name: str = ""  # what the request calls it, for error messages
    not_enforced: tuple[str, ...] = ()  # what the grammar leaves out of JSON schemas: JSON pointers
    prompt_name: str = "inputs"
    limit_name: str = "max_new_tokens"
    # OpenAI's and Anthropic's: `max_new_tokens` is clamped to the rest of the context.
    clamps_max_tokens: bool = False
    parser_config: ParserConfig = ParserConfig()  # which parts the text of a chat has
    image_numbers: Sequence[int] = ()  # of the request's images, for whose tokens the prompt has placeholders
    message_borders: Sequence[int] = ()  # where messages of the prompt end, in characters

    @property
    def characters(self) -> int:
        """How many characters the client and the template wrote; 0 if the prompt is token ids."""
        return len(self.prompt) if isinstance(self.prompt, str) else 0

    def sampling_of(self, sequence: int) -> SamplingParams:
        """Returns the sampling of sequence number `sequence`. Its seed is the request's seed plus that
        number, so each sequence has a random stream of its own. A greedy request has no seed: its sequences
        have the same sampling."""
        if sequence == 0 or self.sampling.seed is None:
            return self.sampling
        return replace(self.sampling, seed=(self.sampling.seed + sequence) & U64_MAX)


class TokenizedPrompt(NamedTuple):
    """A prompt as it runs. ids: with the model's image token for each token of an image. borders: how many
    tokens are in front of each border between messages."""

    prepared: PreparedRequest
    ids: list[int]
    max_new_tokens: int
    images: Sequence[Image] = ()
    borders: Sequence[int] = ()

    @property
    def image_tokens(self) -> int:
        return sum(image.tokens for image in self.images)


def prompts_of(requests: list[PreparedRequest], served: Served) -> list[TokenizedPrompt]:
    """Returns the prompts of a request in token ids, one for each of `requests`, in their order. The
    request's images must be loaded.

    Raises ApiError for more sequences than --max-concurrent-requests, and for a prompt that is empty, too
    long for the context, cannot be tokenized, or has ids that the model does not know.
    """
    asked = sum(prepared.sequences for prepared in requests)
    most = served.config.max_concurrent_requests
    if asked > most:  # it could never be accepted
        limit = f"at most {most} may run and wait (--max-concurrent-requests)"
        raise invalid(None, f"the request asks for {asked} sequences, and {limit}")
    return [_tokenized(prepared, served) for prepared in requests]


def _tokenized(prepared: PreparedRequest, served: Served) -> TokenizedPrompt:
    """Returns the prompt as it runs: its last `truncate` tokens if asked for, how many tokens may follow, its
    images, and the borders between its messages. Raises ApiError for a prompt that cannot run."""
    ids = ids_of(prepared, served)
    if prepared.truncate is not None:
        ids = ids[-prepared.truncate :]
    most = _token_limit(prepared, ids, served)
    images = served.images.read(prepared.image_numbers)
    # A token may reach over a border, which is then before that token.
    beginnings = [ids_of(prepared, served, characters) for characters in prepared.message_borders]
    shared = (os.path.commonprefix([each, ids]) for each in beginnings)  # noqa: RUF071 of lists of ids
    borders = set(map(len, shared)) - {0}
    prompt = TokenizedPrompt(prepared, ids, most, images, sorted(borders))
    if images:
        image_tokens = ids.count(served.text.images.token_id)
        assert image_tokens == prompt.image_tokens, "clients' are escaped"
    return prompt


def ids_of(prepared: PreparedRequest, served: Served, characters: int | None = None) -> list[int]:
    """Returns the tokens of a prompt, with the model's image token for each token of an image. Not yet
    truncated. The images must be loaded. A prompt that was given as token ids is returned itself, not a copy.

    characters: tokens of only so many characters, from the beginning of the text; None: of all. Raises
    ApiError for a text that cannot be tokenized, and for one that is so long that it cannot fit the context;
    shorter texts may still have too many tokens.
    """
    if not isinstance(prepared.prompt, str):
        return prepared.prompt
    longest_token = served.text.tokenizer.longest_token
    # Tokenizing a text takes a hundred times its memory, so one that cannot fit is rejected before.
    most_text = served.config.body_limit(reads_images=False)
    if served.images.are_read and prepared.characters > most_text:  # images alone may be longer
        raise too_large(most_text)
    text = served.images.expand(prepared.prompt[:characters], prepared.image_numbers)
    if prepared.truncate is None and len(text) > served.info.max_total_tokens * longest_token:
        raise _too_many_tokens(prepared, f"at least {len(text) // longest_token}", served)
    return encoded(text, served, prepared.add_special_tokens)


def encoded(text: str, served: Served, add_special_tokens: bool) -> list[int]:
    """Returns the tokens of an escaped text. Raises ApiError (422) for a text that the tokenizer cannot
    encode.

    add_special_tokens: also those that the tokenizer adds, such as BOS.
    """
    try:
        return served.text.tokenizer.encode(text, add_special_tokens)
    except Exception as error:
        raise invalid(None, f"tokenizer error: {error}") from None


def with_image_ids(ids: list[int], images: Sequence[Image], token_id: int) -> list[int]:
    """Returns the tokens as the worker knows them. Each `token_id`, the model's image token, is replaced by
    the next of the images' ids, which are negative; the images are in the order of the prompt, and have as
    many ids as there are image tokens."""
    following = itertools.chain.from_iterable(image.ids for image in images)
    return [next(following) if i == token_id else i for i in ids]


def _token_limit(prepared: PreparedRequest, ids: list[int], served: Served) -> int:
    """Returns how many tokens may follow a prompt of these ids, at least 1. Raises ApiError for a prompt that
    is empty, too long, or has an id that the model does not know.

    The result is `max_new_tokens`, or what is left of the context length if the request has no such limit. If
    prompt and limit together exceed the context length, `clamps_max_tokens` says whether the limit is
    lowered, or ApiError is raised with the numbers. Example: for a context of 100 and a prompt of 90 tokens,
    a limit of 20 becomes 10, or an error.
    """
    info = served.info
    length = len(ids)
    context_length = info.max_total_tokens
    most = context_length - length if prepared.max_new_tokens is None else prepared.max_new_tokens
    if prepared.clamps_max_tokens:
        most = min(most, context_length - length)
    elif length + most > context_length:
        of_images = _of_images(prepared, served)
        tokens = f"{length} `{prepared.prompt_name}` tokens{of_images} and {most} `{prepared.limit_name}`"
        limit = f"tokens + `{prepared.limit_name}` must be <= {context_length} (--max-total-tokens raises it)"
        detail = f"{limit}. Given: {tokens}"
        raise invalid(prepared.prompt_name, detail, CONTEXT_LENGTH_EXCEEDED)
    if length > info.max_input_tokens:
        raise _too_many_tokens(prepared, f"{length}", served)
    require(length > 0, prepared.prompt_name, "cannot be empty")
    check_ids([max(ids)], prepared.prompt_name, info)
    # A prompt that is only scored runs with one token, which is dropped.
    return max(most, 1)


def _too_many_tokens(prepared: PreparedRequest, given: str, served: Served) -> ApiError:
    """Returns the error of a prompt that is too long, in the words and with the status of the prompt's API:
    400 if the API clamps the limit, as OpenAI's and Anthropic's do, else 422. given: how many tokens the
    prompt has, in words."""
    limit = f"must have at most {served.info.max_input_tokens} tokens"
    given += _of_images(prepared, served)
    if not prepared.clamps_max_tokens:
        detail = f"{limit} (--max-input-tokens raises it). Given: {given}"
        return invalid(prepared.prompt_name, detail, CONTEXT_LENGTH_EXCEEDED)
    # OpenAI's status and code, and the words that clients such as LangChain look for.
    limit_text = f"This model's maximum context length is {served.info.max_total_tokens} tokens"
    what = f"{limit_text} (--max-total-tokens raises it): `{prepared.prompt_name}` {limit}. Given: {given}"
    return ApiError(
        400, CONTEXT_LENGTH_EXCEEDED, what, code=CONTEXT_LENGTH_EXCEEDED, param=prepared.prompt_name
    )


def _of_images(prepared: PreparedRequest, served: Served) -> str:
    """Returns how many of a prompt's tokens are of images, for error messages, such as " (576 of them for 1
    image)"; "": the prompt has no images. The images must be loaded."""
    images = served.images.read(prepared.image_numbers)
    if not images:
        return ""
    tokens = sum(image.tokens for image in images)
    return f" ({tokens} of them for {len(images)} image{'s' if len(images) > 1 else ''})"
