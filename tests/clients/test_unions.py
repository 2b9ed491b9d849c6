"""Every member of the SDKs' request unions in a conversation: it is answered, or the error names what the server needs."""

import typing
from collections import Counter

import anthropic
import openai
import pydantic
import pytest
import typing_extensions
from anthropic.types import ContentBlockParam, ToolUnionParam
from anthropic.types.beta import BetaContentBlockParam, BetaToolUnionParam
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam
from openai.types.responses import ResponseInputItemParam, ToolParam

MODEL = "neuron-textgen/demo"
USER = {"role": "user", "content": "What is Deep Learning?"}
ASSISTANT = {"role": "assistant", "content": "Let me see."}
PLAIN = {str: "x", int: 1, float: 0.5, bool: True, object: {"a": "b"}, typing.Any: {"a": "b"}, type(None): None}
DEPTH = 2  # of objects that vary; what is in them has one value


def members(union):
    """The objects of a union, and of the unions in it."""
    origin = typing.get_origin(union)
    if origin in (typing.Union, typing.Annotated):
        inner = typing.get_args(union)
        return [member for one in (inner[:1] if origin is typing.Annotated else inner) for member in members(one)]
    return [union]


def examples(kind, depth=0):
    """Values of a type. An object comes with its required fields, with all, and with each value of each field."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in PLAIN:
        return [PLAIN[kind]]
    if origin is typing.Literal:
        return list(inner[:2])
    if origin is typing.Union:
        return [value for one in inner for value in examples(one, depth)]
    if origin in (typing.Annotated, typing_extensions.Required, typing_extensions.NotRequired):
        return examples(inner[0], depth)
    if origin is dict or kind is dict:
        return [{}]
    if hasattr(origin, "__iter__"):  # a list, or what the SDKs write for one
        return [[value] for value in examples(inner[0], depth + 1)]
    if not _is_object(kind):
        return ["x"]
    return _objects(kind, depth)


def _is_object(kind):
    return typing_extensions.is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, pydantic.BaseModel))


def _objects(kind, depth):
    if typing_extensions.is_typeddict(kind):
        hints = typing_extensions.get_type_hints(kind, include_extras=True)
        optional = {name for name, hint in hints.items() if typing.get_origin(hint) is not typing_extensions.Required}
    else:
        hints = {name: field.annotation for name, field in kind.model_fields.items()}
        optional = {name for name, field in kind.model_fields.items() if not field.is_required()}
    if depth > DEPTH:
        return [{name: _values(name, hint, depth)[0] for name, hint in hints.items() if name not in optional}]
    values = {name: _values(name, hint, depth) for name, hint in hints.items()}
    full = {name: found[0] for name, found in values.items()}
    least = {name: value for name, value in full.items() if name not in optional}
    return [least, full, *({**full, name: value} for name, found in values.items() for value in found[1:])]


def _values(name, hint, depth):
    """Those of a field; the arguments of a call are JSON in a string, those of a function a schema."""
    if name in ("parameters", "input_schema"):
        return [{"type": "object", "properties": {"a": {"type": "string"}}}]
    values = examples(hint, depth + 1)
    return ['{"a": "b"}'] if name == "arguments" and values == ["x"] else values


def histories(message):
    """A conversation of one turn, and of three."""
    return [[message], [USER, message, USER, ASSISTANT, USER]]


def refusals(ask, error_type, conversations):
    """The messages of errors, counted. Fails for a status other than 200 and 400."""
    counted = Counter()
    for conversation in conversations:
        try:
            ask(conversation)
        except error_type as error:
            assert error.status_code == 400, (conversation, error)
            counted[error.body["error"]["message"] if "error" in error.body else error.body["message"]] += 1
    return counted


def assert_named(counted, *accepted):
    """Each error says in the client's own words which field is missing; or it is that of a prompt, with the definitions
    of many tools, that is too long for this small model."""
    accepted = (*accepted, "maximum context length")
    surprises = [text for text in counted if not any(words in text for words in accepted)]
    assert not surprises, "\n".join(surprises)


@pytest.fixture
def openai_client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("member", members(ResponseInputItemParam), ids=lambda member: member.__name__)
def test_every_item_of_responses(openai_client, member):
    def ask(items):
        openai_client.responses.create(model=MODEL, input=items, max_output_tokens=1)

    conversations = [history for item in examples(member) for history in histories(item)]
    accepted = ["`input` needs an item that the model can read"]
    if member.__name__ == "ItemReference":
        accepted.append(".id` was not found")
    if member.__name__ == "CompactionTrigger":
        accepted.append("`input` has no conversation to summarize")
    if member.__name__ == "FunctionCallOutput":
        accepted.append("needs `call_id`")  # which these types call optional
    assert_named(refusals(ask, openai.APIStatusError, conversations), *accepted)


@pytest.mark.parametrize("member", members(ChatCompletionMessageParam), ids=lambda member: member.__name__)
def test_every_message_of_chats(openai_client, member):
    def ask(messages):
        openai_client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)

    conversations = [history for message in examples(member) for history in histories(message)]
    assert_named(refusals(ask, openai.APIStatusError, conversations), "needs `content`")


@pytest.mark.parametrize(
    "member",
    dict.fromkeys([*members(ContentBlockParam), *members(BetaContentBlockParam)]),
    ids=lambda member: member.__name__,
)
def test_every_block_of_messages(url, member):
    conversations = [
        history
        for block in examples(member)
        for role in ("user", "assistant")
        for history in histories({"role": role, "content": [block]})
    ]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:

        def ask(messages):
            client.beta.messages.create(model=MODEL, messages=messages, max_tokens=1)

        assert_named(refusals(ask, anthropic.APIStatusError, conversations))


def named_tools(member):
    """What the error of a tool says that is refused by name."""
    is_refused = "Computer" in member.__name__ or "Browser" in member.__name__
    return ["no computer or browser use"] if is_refused else []


def _searched(tool):
    """The tool with one that finds it: deferred tools alone leave nothing to call."""
    return [tool, {"type": "function", "name": "other", "parameters": {"type": "object"}}]


@pytest.mark.parametrize("member", members(ToolParam), ids=lambda member: member.__name__)
def test_every_tool_of_responses(openai_client, member):
    def ask(tools):
        openai_client.responses.create(model=MODEL, input="Hi", tools=tools, max_output_tokens=1)

    assert_named(refusals(ask, openai.APIStatusError, map(_searched, examples(member))), *named_tools(member))


@pytest.mark.parametrize("member", members(ChatCompletionToolUnionParam), ids=lambda member: member.__name__)
def test_every_tool_of_chats(openai_client, member):
    def ask(tool):
        openai_client.chat.completions.create(model=MODEL, messages=[USER], tools=[tool], max_tokens=1)

    assert_named(refusals(ask, openai.APIStatusError, examples(member)))


@pytest.mark.parametrize(
    "member", dict.fromkeys([*members(ToolUnionParam), *members(BetaToolUnionParam)]), ids=lambda member: member.__name__
)
def test_every_tool_of_messages(url, member):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:

        def ask(tool):
            client.beta.messages.create(model=MODEL, messages=[USER], tools=[tool], max_tokens=1)

        assert_named(refusals(ask, anthropic.APIStatusError, examples(member)), *named_tools(member))
