"""From the body of a request to an `Answer`: which jobs a route asks for, and in which form it is answered.

Brings together the rules (validate.py), the model's chat template (chat.py) and tokenizer (text.py), and the forms of responses
(answers.py). Everything here may run in a thread beside the event loop, so nothing here logs or touches Flask's request or the
worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from api import errors, responses
from api import fields as validate
from api import types as schema
from api.answer import Answer, ChatAnswer, CompletionAnswer, NativeAnswer, PredictionsAnswer
from api.engine_client import EngineClient
from api.errors import ApiError
from api.fields import Job
from api.tools import tool_use
from api.types import ChatRequest, CompletionRequest, GenerateRequest
from config import Config
from protocol import ModelInfo
from text.grammar import GrammarError, Grammars
from text.reader import Reading
from text.template import ChatTemplate, TemplateError
from text.tokenizer import Tokenizer, TooManyTokens
from text.tool_formats import THINK, ModelTools, after_thinking

MAX_TOKENIZED = 500_000  # bytes of a text for /tokenize, each of which may be a token that takes 250 bytes
MAX_LISTED_TOKENS = 100_000  # of a response of /tokenize, which then has 4 MB


class ModelText(NamedTuple):
    """The served model's tokenizer and chat template, and what they say about tools and grammars."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    grammars: Grammars
    tools: ModelTools | None

    @classmethod
    def load(cls, info: ModelInfo, config: Config) -> ModelText:
        template = ChatTemplate.load(info.model_dir, config.tokenizer_config_path)
        tokenizer = Tokenizer(info.tokenizer_dir, info.eos_token_ids, config.escape_special_tokens)
        grammars = Grammars.load(info.tokenizer_dir, info.vocab_size, info.eos_token_ids)
        return cls(tokenizer, template, grammars, ModelTools.of(template, tokenizer, config.tool_parser))


class Handlers:
    """A method for each route; all raise ApiError."""

    def __init__(self, config: Config, engine: EngineClient):
        self._config = config
        self._engine = engine

    def generate(self, body: bytes) -> Answer:
        return self._native(validate.parse(body, GenerateRequest), streams=False)

    def generate_stream(self, body: bytes) -> Answer:
        return self._native(validate.parse(body, GenerateRequest), streams=True)

    def compat(self, body: bytes) -> Answer:
        """`POST /`: streams when the body says so, and gives the prompt back unless it says not to."""
        generate = validate.parse(body, GenerateRequest)
        return self._native(generate, streams=bool(generate.stream), in_list=True, full_text=True)

    def chat(self, body: bytes) -> Answer:
        chat = validate.parse(body, ChatRequest)
        return ChatAnswer([self._chat_job(chat)], *self._parts(chat.stream), request=chat)

    def completion(self, body: bytes) -> Answer:
        completion = validate.parse(body, CompletionRequest)
        jobs = validate.check_completion(completion, self._config, self._engine.info)
        return CompletionAnswer(jobs, *self._parts(completion.stream), request=completion)

    def responses(self, body: bytes) -> Answer:
        request = validate.parse(body, schema.ResponsesRequest)
        chat = responses.chat_of(request)
        job = responses.with_own_names(self._chat_job, chat)
        return responses.ResponsesAnswer([job], *self._parts(chat.stream), request=request, chat=chat)

    def of_invocation(self, body: bytes) -> tuple[Callable[[bytes], Answer], bool]:
        """The handler for a body of `/invocations`, and whether it is one of OpenAI's."""
        handler = validate.choose(
            body, {"inputs": self.compat, "messages": self.chat, "prompt": self.completion}
        )
        return handler, handler != self.compat

    def vertex(self, body: bytes) -> Answer:
        jobs, prefixes = [], []
        for instance in validate.vertex_instances(validate.parse(body, schema.VertexRequest), self._config):
            if isinstance(instance, ChatRequest):
                jobs.append(self._chat_job(instance))
                prefixes.append("")
            else:
                jobs.append(validate.check(instance, self._config, self._engine.info, streaming=False))
                wants_prompt = instance.parameters and instance.parameters.return_full_text
                prefixes.append(instance.inputs if wants_prompt else "")
        return PredictionsAnswer(jobs, *self._parts(), prefixes=prefixes)

    def infer(self, sentence: str) -> Answer:
        if not sentence:
            raise errors.invalid("sentence", "cannot be empty")
        job = validate.check(GenerateRequest(sentence), self._config, self._engine.info, streaming=False)
        job = replace(job, prompt_name="sentence")
        return PredictionsAnswer([job], *self._parts(), prefixes=[sentence], form=list)

    def tokenize(self, body: bytes) -> list[schema.SimpleToken]:
        text = self._engine.text.tokenizer.escape(validate.parse(body, GenerateRequest).inputs)
        return self._tokens(text, add_special_tokens=True)

    def chat_tokenize(self, body: bytes) -> schema.ChatTokenizeResponse:
        text = self.chat(body).jobs[0].prompt
        tokens = self._tokens(text, add_special_tokens=False)
        return schema.ChatTokenizeResponse(tokens, self._engine.text.tokenizer.unescape(text))

    def _tokens(self, text: str, add_special_tokens: bool) -> list[schema.SimpleToken]:
        tokenizer = self._engine.text.tokenizer
        raw = tokenizer.unescape(text).encode()
        if len(raw) > MAX_TOKENIZED:
            raise errors.invalid(
                None, f"a text to tokenize must have at most {MAX_TOKENIZED} bytes. Given: {len(raw)}"
            )
        try:
            spans = tokenizer.spans(text, add_special_tokens, MAX_LISTED_TOKENS)
        except TooManyTokens as error:
            raise errors.invalid(
                None, f"the text has {error.args[0]} tokens; at most {MAX_LISTED_TOKENS} are listed"
            ) from None
        except ValueError as error:
            raise errors.invalid(None, f"tokenizer error: {error}") from None
        return [
            schema.SimpleToken(i, raw[start:stop].decode(errors="replace"), start, stop)
            for i, start, stop in spans
        ]

    def chat_prompt(self, chat: ChatRequest) -> str:
        """The text that the model's chat template makes of the messages and tools."""
        template, escape = self._engine.text.template, self._engine.text.tokenizer.escape
        if template and chat.tools:
            template = template.for_tools
        messages = validate.messages_of(chat.messages, template.words if template else ())
        try:
            if template is None:
                raise TemplateError("template not found")
            # A role is a word that the template expects.
            escaped = [escape(message) | {"role": message["role"]} for message in messages]
            return template.render(escaped, escape(chat.tools))
        except (TemplateError, RecursionError) as error:
            raise ApiError(422, "template_error", f"Template error: {error}") from None

    def _native(
        self, generate: GenerateRequest, streams: bool, in_list: bool = False, full_text: bool = False
    ) -> Answer:
        parameters = generate.parameters or schema.Parameters()
        if parameters.return_full_text is None:
            parameters.return_full_text = full_text
        job = validate.check(generate, self._config, self._engine.info, streams)
        return NativeAnswer([job], *self._parts(streams), parameters=parameters, in_list=in_list)

    def _chat_job(self, chat: ChatRequest) -> Job:
        """The job of a chat, with the grammar of its format, its tools and its thinking together."""
        job, text = validate.check_chat(chat, self._config, self._engine.info), self._engine.text
        use = tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls, text.tools)
        prompt, thinking = self.chat_prompt(chat), ""
        if self._config.reasoning_parser:
            thinking = "inside" if prompt.rstrip().endswith(THINK) else "before"
        name, grammar = job.grammar_name, job.grammar
        if use and grammar:
            grammar = use.grammar_beside(name, grammar)
        elif use:
            name, grammar = "tool_choice" if use.is_forced else "tools", use.grammar
        if grammar:
            try:
                grammar = after_thinking(grammar, thinking, text.tokenizer.token_to_id)
            except GrammarError as error:
                raise errors.invalid(name, str(error)) from None
        job = validate.with_grammar(job, name, grammar, self._engine.info)
        name = (
            "tools" if use and name == "tool_choice" else job.grammar_name
        )  # whose schemas may fail to compile
        return replace(job, prompt=prompt, reading=Reading(use, thinking), grammar_name=name)

    def _parts(self, streams: bool | None = False) -> tuple[ModelInfo, Tokenizer, bool]:
        return self._engine.info, self._engine.text.tokenizer, bool(streams)


def prompt_ids(engine: EngineClient, job: Job) -> list[int]:
    if not isinstance(job.prompt, str):
        return job.prompt
    tokenizer = engine.text.tokenizer
    # Tokenizing a text takes a hundred times its memory, so one that cannot fit is refused before.
    if job.truncate is None and len(job.prompt) > engine.info.max_total_tokens * tokenizer.longest_token:
        raise validate.too_many_tokens(
            job, f"at least {len(job.prompt) // tokenizer.longest_token}", engine.info
        )
    is_written_by_template = not job.add_special_tokens
    text = job.prompt if is_written_by_template else tokenizer.escape(job.prompt)
    try:
        return tokenizer.encode(text, job.add_special_tokens)
    except Exception as error:
        raise errors.invalid(None, f"tokenizer error: {error}") from None
