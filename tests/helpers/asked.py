"""What a request becomes without a server around it: its requests, or the error that it is refused with."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import msgspec
import pytest
from fakes.model import EOS
from fakes.tokenizer import VOCABULARY, byte_tokenizer
from model_info import info_of
from tool_calls import thinking_of

from api import clouds, tgi
from api.anthropic import messages
from api.generation.prepared_request import ModelText, Served, TokenizedPrompt
from api.generation.response_writer import GeneratedSequence
from api.http import fields
from api.http.errors import OPENAI, TGI, ApiError
from api.http.response_store import OwnedResponses, ResponseStore
from api.http.types import encode_json
from api.openai import chat, completions, responses
from config import Config
from protocol import Token
from text.grammar import Grammars
from text.output.call_syntaxes import ModelTools
from text.output.reasoning_formats import ModelReasoning
from text.output.tool_formats import TOOL_FORMATS
from text.template import ChatTemplate
from text.template_capabilities import TemplateCapabilities
from text.tokenizer import Tokenizer

CONFIG = Config(max_stop_sequences=4, max_top_n_tokens=5, max_best_of=3, max_client_batch_size=4)
INFO = info_of("someone/model", "abc123", "/somewhere", VOCABULARY, [EOS], 8, 100, 120, "cpu", "float32")
ON_DEVICE = msgspec.structs.replace(INFO, sampling="device")
TEMPLATE = (
    "{# 'ipython' #}{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'tool' and not m.tool_call_id %}"
    "{{ raise_exception('no id of `messages`') }}{% endif %}{{ m.role[0] }}:{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}{{ m.name }}{{ m.tool_call_id }};{% endfor %}a:"
)
USER = {"role": "user", "content": "Hi"}
# Two calls of `weather`, as a model with Hermes' format writes them.
CALLS = [f'<tool_call>\n{{"name": "weather", "arguments": {{"city":"{city}"}}}}\n</tool_call>' for city in ("Oslo", "Rome")]
# The APIs, each with a body that a request's fields are added to; native ones have theirs in `parameters`.
DIALECTS = {
    "native": (tgi.generate, {"inputs": "Hello"}),
    "sampled": (tgi.generate, {"inputs": "Hello"}),
    "stream": (tgi.generate_stream, {"inputs": "Hello"}),
    "chat": (chat.chat, {"messages": [USER]}),
    "greedy chat": (chat.chat, {"messages": [USER], "temperature": 0}),
    "completion": (completions.completion, {"prompt": "Hello"}),
    "responses": (responses.responses, {"input": "Hi"}),
    "messages": (messages.messages, {"messages": [USER], "max_tokens": 9}),
    "vertex": (clouds.vertex, {"instances": [{"inputs": "Hello"}]}),
}
NATIVE = ("native", "sampled", "stream")


@functools.cache
def text() -> ModelText:
    """A token is a byte; calls of tools are written in Hermes' format."""
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer(Path(folder))
        tokenizer = Tokenizer(folder)
    template = ChatTemplate(TEMPLATE, {})
    capabilities = TemplateCapabilities.of(template)
    return ModelText(tokenizer, template, None, ModelTools(TOOL_FORMATS[0]), capabilities, ModelReasoning())


def serving(info=INFO, config=CONFIG) -> Served:
    return Served(config, info, text(), OwnedResponses(ResponseStore(Path(), 0), b"", 0))


@functools.cache
def grammars() -> Grammars:
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer(Path(folder))
        return Grammars(folder, VOCABULARY, [EOS])


def allows(grammar: str, output: str) -> bool:
    """Whether a model with this grammar may write the whole output."""
    matcher = grammars().compile(grammar)
    tokens = [*text().tokenizer.encode(output, add_special_tokens=False), EOS]
    return all(matcher.consume_token(token) for token in tokens[:-1]) and matcher.is_accepting()


def record_renders(monkeypatch) -> list:
    """The messages and the options that the chat template gets from now on; it renders "Hi Well" of any."""
    text()  # probes the template
    rendered = []

    def render(_, messages, tools, options, begins_answer):
        rendered.append((messages, options))
        return "Hi Well"

    monkeypatch.setattr(ChatTemplate, "render", render)
    return rendered


def body_of(dialect, **given):
    body = DIALECTS[dialect][1]
    if dialect not in NATIVE:
        return body | given
    return body | {"parameters": given | ({"do_sample": True} if dialect == "sampled" else {})}


def answer_to(dialect, body, info=INFO, config=CONFIG):
    """The answer that a whole body asks for, from its bytes on."""
    data = fields.parse_body(body if isinstance(body, bytes) else json.dumps(body).encode())
    return DIALECTS[dialect][0](data, serving(info, config))


def all_prepared(dialect, info=INFO, config=CONFIG, **given):
    return answer_to(dialect, body_of(dialect, **given), info, config).requests


def prepared(dialect="native", info=INFO, config=CONFIG, **given):
    (only,) = all_prepared(dialect, info, config, **given)
    return only


def nameless(prepared):
    """The prepared without the names of fields in its API, which its errors have."""
    config = prepared.parser_config
    if config.calls:
        functions = [dataclasses.replace(function, path="") for function in config.calls.functions]
        answer = config.calls.answer._replace(grammar_name="")
        config = dataclasses.replace(config, calls=dataclasses.replace(config.calls, functions=functions, answer=answer))
    return msgspec.structs.replace(prepared, prompt_name="", limit_name="", grammar_name="", parser_config=config)


def refusal_of(dialect, body, info=INFO, config=CONFIG) -> ApiError:
    with pytest.raises(ApiError) as refused:
        answer_to(dialect, body, info, config)
    return refused.value


def refusal(dialect, info=INFO, config=CONFIG, **given) -> ApiError:
    return refusal_of(dialect, body_of(dialect, **given), info, config)


def as_tgi(error):
    return json.loads(encode_json(TGI.body(error)))


def as_openai(error):
    return json.loads(encode_json(OPENAI.body(error)))["error"]


def assert_invalid(error: ApiError, detail: str) -> None:
    assert (error.status, error.error_type) == (422, "validation")
    assert str(error) == f"Input validation error: {detail}"


def with_thinking(prepared, begin):
    """The prepared of a model whose reasoning begins so."""
    parser_config = dataclasses.replace(prepared.parser_config, thinking=thinking_of(begin))
    return msgspec.structs.replace(prepared, parser_config=parser_config)


def written(answer, text, finish_reason):
    """The answer to one prepared whose model writes `text`, a byte a token: the stream as text, or the object."""
    (asked_for,) = answer.requests
    answer.request_id = "r"
    ids = answer.tokenizer.encode(text) + [EOS] * (finish_reason == "eos_token")
    sequence = GeneratedSequence(answer.tokenizer, TokenizedPrompt(asked_for, [1], 999), 0, 0)
    stream = b""
    for n, token in enumerate(ids, 1):
        pieces = sequence.take(Token(1, token, 0.0, [], finish_reason if n == len(ids) else None))
        sequence.pieces += pieces
        if answer.streams:
            stream += answer.events(sequence, pieces)
        if sequence.finish_reason is not None:
            break
    if answer.streams:
        return (stream + answer.stream_end([sequence])).decode()
    return json.loads(encode_json(answer.whole([sequence])))
