"""A chat of any API: its messages, their form for a chat template, and how it becomes a PreparedRequest.

Chat completions, Responses, Anthropic's Messages, Vertex AI, SageMaker and `/chat_tokenize` bring their
chats here as a `ChatRequest`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import gevent
from msgspec import Struct
from msgspec.structs import replace

from api.chats import formats
from api.chats.content import PARTS, SYSTEM_ROLES, ContentPart, ContentReader, needed
from api.chats.formats import Constraint, naming
from api.chats.openai_shared import OpenAIRequest, check_openai
from api.chats.reasoning import template_variables
from api.chats.template_adapter import ALIASES, adapt_to_template
from api.chats.tools import OfferedTools, as_function, tool_policy
from api.generation.prepared_request import PreparedRequest, Served
from api.generation.request_images import RequestImages
from api.http.errors import ApiError
from api.http.fields import (
    CHAT_FIELDS,
    WITH_IMAGES,
    FieldNames,
    Json,
    check_ids,
    check_top_n,
    require,
    without_surrogates,
)
from api.http.types import U32
from protocol import SamplingParams
from text.output.json_mender import whole_value
from text.output.parser import ParserConfig
from text.output.reasoning_formats import Thinking
from text.template import IMAGE_MARK, RESERVED, THOUGHT, THOUGHTS, TemplateError, images_of

OPENAI_TOP_LOGPROBS = 20  # OpenAI's own limit
NEVER = -100.0  # the bias by which OpenAI bans a token
PLAIN_ROLES = ("system", "user", "assistant", "tool")  # which template_capabilities.py has tried
ROLES = (*PLAIN_ROLES, *ALIASES)
V = TypeVar("V")


def _thinking(part: ContentPart) -> str:
    text = THOUGHTS.sub(r"\1", part.text("thinking?"))
    return THOUGHT.format(text) if text else ""


CHAT_PARTS = PARTS | {"thinking": _thinking}  # that of Mistral's API


class Message(Struct, omit_defaults=True):
    """One message of a chat. The parts of `content` (CHAT_PARTS has their types) are joined."""

    role: str
    content: str | list[Json] | None = None
    refusal: str | None = None
    name: str | None = None
    function_call: Json | None = None  # the older name of one call
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # of an earlier answer, for templates that write it
    reasoning: str | None = None  # the same


def call_message(id: str, name: str, arguments: Json) -> Message:
    """Returns a message of the assistant that calls one function. arguments: by name."""
    function = {"name": name, "arguments": arguments}
    return Message("assistant", tool_calls=[{"id": id, "type": "function", "function": function}])


class ReasoningSwitch(Struct):
    """`type` is that of `thinking`, enabled or disabled; `effort` and `enabled` are those of `reasoning`."""

    type: str | None = None
    effort: str | None = None
    enabled: bool | None = None
    budget_tokens: int | None = None  # and the same as `max_tokens`
    max_tokens: int | None = None

    @property
    def is_on(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type, self.enabled)


class Prediction(Struct):
    """The expected output, such as the file to edit. It changes the speed, never the text."""

    type: str
    content: str | list[Json]


class ChatRequest(OpenAIRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    mm_processor_kwargs: Json | None = None  # vLLM's
    prediction: Prediction | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None  # vLLM's name for the most tokens of reasoning; negative: any
    thinking_budget_tokens: int | None = None  # llama.cpp's
    thinking_budget: int | None = None  # Qwen's
    # Other servers' switches of reasoning, and OpenRouter's.
    enable_thinking: bool | None = None
    think: bool | str | None = None
    thinking: ReasoningSwitch | bool | None = None
    reasoning: ReasoningSwitch | bool | str | None = None

    @property
    def switches(self) -> list[ReasoningSwitch]:
        return [each for each in (self.thinking, self.reasoning) if isinstance(each, ReasoningSwitch)]


def prepare_chat(
    chat: ChatRequest,
    served: Served,
    field_names: FieldNames = CHAT_FIELDS,
    offered: OfferedTools | None = None,
) -> PreparedRequest:
    """Returns the prepared request of a chat: its prompt, its checked settings and its grammar. Adds the
    chat's images to `served.images`, which are not loaded here. Renders the template in a child process, and
    waits for it. Logs skipped parts.

    Raises ApiError for a field that is wrong or not supported, for a chat that the template rejects, and for
    an unknown LoRA adapter (404); the grammar is not compiled, nor the length of the prompt checked. offered:
    the tools, which `tool_choice` chooses from; None: those of `chat.tools`. The template gets the listed
    tools. If no tool is listed, the template gets the tools that the conversation adds: a template explains
    calls only beside a list. field_names: for errors.
    """
    text = served.text
    checked = _check(chat, served, field_names)
    constraint = formats.of_openai(chat, field_names)
    offered = offered or OfferedTools(chat.tools or ())
    listed = offered.listed
    tools = [*listed, *offered.found.values()]
    policy = tool_policy(tools, chat.tool_choice, chat.parallel_tool_calls, text.tools, field_names)
    if tools and chat.tool_choice == "none":
        checked["sampling"] = _without_calls(checked["sampling"], served)
    forms = [form for _path, form in listed or tools]
    rendered, continued = _render_prompt(chat, forms, served, field_names)
    with naming(constraint.grammar_name):
        constraint = constraint._replace(grammar=text.reasoning.in_answer(constraint.grammar))
    if policy:
        policy = dataclasses.replace(policy, answer=constraint)
        constraint = policy.constraint
    thinking = text.reasoning.thinking(rendered["prompt"], continued)
    parser_config = ParserConfig(policy, thinking, enforces_calls=bool(constraint.grammar))
    if thinking:
        budget = _budget(chat, checked["max_new_tokens"], served)
        constraint = _with_reasoning(constraint, thinking, budget, served, field_names)
    constraint.check(served.info, chat.ignore_eos)
    if constraint.grammar_name == "tool_choice":
        constraint = constraint._replace(grammar_name="tools")  # whose schemas may fail to compile
    return PreparedRequest(
        **checked,
        **constraint._asdict(),
        **rendered,
        parser_config=parser_config,
        prediction=_prediction(chat.prediction, served) if chat.prediction else [],
    )


def _with_reasoning(
    constraint: Constraint, thinking: Thinking, budget: int | None, served: Served, field_names: FieldNames
) -> Constraint:
    """Returns the constraint of an output of at most `budget` tokens of reasoning, then what `constraint`
    allows. budget: None: any number. Without a budget and a grammar, `constraint` is returned as it is. A
    grammar for the budget alone has the name of the budget's field. Raises ApiError for a budget if the
    model's closing marker is not one token, and for a grammar that is too large with reasoning."""
    if not (constraint.grammar or budget is not None):
        return constraint
    close = thinking.format.close
    detail = f"is not supported by this model: `{close}` is not one token of its tokenizer"
    require(budget is None or thinking.close_id is not None, field_names.budget, detail)
    path = constraint.grammar_name if constraint.grammar else field_names.budget
    with naming(path):
        grammar = served.text.reasoning.grammar(thinking, constraint.grammar, budget)
    return constraint._replace(grammar_name=path, grammar=grammar)


def _without_calls(sampling: SamplingParams, served: Served) -> SamplingParams:
    """Returns a copy of the sampling with a bias that bans the token with which a call opens, in place of the
    client's bias for that token. `sampling` itself is returned if no single token opens a call, or if the
    device samples."""
    tools = served.text.tools
    marker = tools.token_id(tools.format.open) if tools.format and tools.format.open else None
    if marker is None or served.info.sampling == "device":
        return sampling
    biases = dict(sampling.logit_bias) | {marker: NEVER}
    return replace(sampling, logit_bias=list(biases.items()))


def _budget(chat: ChatRequest, max_new_tokens: int | None, served: Served) -> int | None:
    """The most tokens of reasoning; None: as many as the output may have.

    The first field that is set counts: `thinking_token_budget`, `thinking_budget_tokens`, `thinking_budget`,
    then `budget_tokens` and `max_tokens` of `thinking`, then those of `reasoning`. A negative budget, or one
    that is not below `max_new_tokens` and the context length, is None.
    """
    budgets = [chat.thinking_token_budget, chat.thinking_budget_tokens, chat.thinking_budget]
    budgets += [each for switch in chat.switches for each in (switch.budget_tokens, switch.max_tokens)]
    budget = _first(int, budgets)
    most = min(filter(None, (served.info.max_total_tokens, max_new_tokens)))
    return budget if budget is not None and 0 <= budget < most else None


def _prediction(given: Prediction, served: Served) -> list[int]:
    """Returns the tokens of a predicted output, without those beyond the context length. A part that is no
    text is predicted as a note, or left out. Raises ApiError for a type other than content, for malformed
    content, and for a token that the model does not know."""
    require(given.type == "content", "prediction.type", "must be `content`", given=given.type)
    text = ContentReader(PARTS).text("prediction.content", given.content, "")
    tokenizer = served.text.tokenizer
    most = served.info.max_total_tokens
    tokens = tokenizer.encode(tokenizer.escape(text[: most * tokenizer.longest_token]), False)[:most]
    check_ids([max(tokens, default=0)], "prediction", served.info)
    return tokens


def _check(chat: ChatRequest, served: Served, field_names: FieldNames) -> Json:
    """Checks the limits and the fields of sampling of a chat and, with `continue_final_message`, whether its
    last message is the assistant's. Returns fields of the PreparedRequest, by name. Raises ApiError for the
    first of these that is wrong, for more messages than the prompt may have tokens, and for an unknown LoRA
    adapter (404)."""
    if chat.continue_final_message:  # vLLM's, for what happens unasked
        is_assistants = chat.messages and chat.messages[-1].role == "assistant"
        require(is_assistants, "continue_final_message", "needs a last message of the assistant")
        detail = "cannot be true together with `continue_final_message`"
        require(not chat.add_generation_prompt, "add_generation_prompt", detail)
    require(chat.logprobs or not chat.top_logprobs, "top_logprobs", "needs `logprobs` to be true")
    limit_field = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(chat, limit_field)
    limit_name = field_names.limit or limit_field
    require(limit is None or limit >= field_names.least_limit, limit_name, "must be strictly positive")
    count = len(chat.messages)
    most = served.info.max_input_tokens
    limit_text = f"more than the {most} tokens of the longest prompt (--max-input-tokens raises it)"
    require(count <= most, field_names.prompt, f"has {count} messages, {limit_text}")
    top_n = chat.top_logprobs or 0 if chat.logprobs else None
    checked = check_openai(chat, limit, top_n, served, field_names)
    check_top_n(chat.top_logprobs, "top_logprobs", max(OPENAI_TOP_LOGPROBS, served.config.max_top_n_tokens))
    return checked | {
        "add_special_tokens": bool(chat.add_special_tokens),  # the template writes them
        "prompt_name": field_names.prompt,
        "limit_name": limit_name,
    }


def _render_prompt(
    chat: ChatRequest, tools: list[Json], served: Served, field_names: FieldNames
) -> tuple[Json, str]:
    """Writes the messages and these tools with the model's chat template, in a child process, and waits for
    it. Adds the images of the messages to the request's. Logs skipped parts. Raises ApiError without a
    template, for messages that are wrong or that the template rejects or leaves out, and for options that
    cannot be set.

    Returns two things: `prompt`, `image_numbers` and `message_borders` of the PreparedRequest, by name; and
    the assistant's text at the end of the prompt that the output continues, "": none. There are borders only
    for a model with recurrent states. tools: in a chat's form; if `tool_choice` is none, they are written
    only by a template that has a place for them.
    """
    template = served.text.template
    escape = served.text.tokenizer.escape
    if template is None:
        raise ApiError(422, "template_error", "Template error: template not found")
    capabilities = served.text.capabilities
    options = _template_options(chat, served)
    if tools or any(message.tool_calls or message.role == "tool" for message in chat.messages):
        template = template.for_tools
    messages = _template_messages(chat.messages, template.words, field_names, served.images)
    functions = [as_function(tool) for tool in tools] or None
    messages = adapt_to_template(messages, functions if chat.tool_choice != "none" else None, capabilities)
    # A role is a word that the template expects.
    escaped = [escape(message) | {"role": message["role"]} for message in messages]
    begins_answer = chat.add_generation_prompt is not False or bool(chat.continue_final_message)
    given = (escaped, escape(functions) if capabilities.tools else None, options, begins_answer)
    try:
        prompt = template.render(*given)
        borders = template.borders(prompt, *given) if served.info.state_bytes else []
    except TemplateError as error:
        # A template's error may repeat the client's own words.
        raise ApiError(422, "template_error", "Template error: ", quoted=str(error)) from None
    image_numbers = _images_written(chat, escaped, prompt, served, field_names)
    served.images.set_options(chat.mm_processor_kwargs or {}, "mm_processor_kwargs", image_numbers)
    last = messages[-1] if messages else {}
    prompt, continued = _continued(prompt, last, begins_answer, served)
    return {"prompt": prompt, "image_numbers": image_numbers, "message_borders": borders}, continued


def _images_written(
    chat: ChatRequest, messages: list[Json], prompt: str, served: Served, field_names: FieldNames
) -> list[int]:
    """Returns the numbers of the images in a prompt, in the order of the messages. Raises ApiError if the
    template has left out or repeated an image, or left out a message whose role is not in PLAIN_ROLES, and
    for `prompt_logprobs` with images. messages: as the template got them."""
    order = []
    for message in messages:
        texts = IMAGE_MARK.split(message["content"])[::2]
        is_written = message["role"] in PLAIN_ROLES or all(text.strip() in prompt for text in texts)
        detail = "has a role that the model's chat template leaves out"
        require(is_written, field_names.prompt, detail, given=message["role"])
        order += images_of(message["content"])
    if order:
        require(chat.prompt_logprobs is None, "prompt_logprobs", WITH_IMAGES)
        written = prompt.count(served.text.images.placeholder)
        detail = f"has {len(order)} images, and the model's chat template writes {written} of them"
        require(written == len(order), field_names.prompt, detail)
    return order


def _continued(prompt: str, last: Json, begins_answer: bool, served: Served) -> tuple[str, str]:
    """Returns the prompt, and the text at the end of the prompt that the output continues; "": none.

    The output continues the last message if that is the assistant's and calls no tools. The text is then its
    content. If the last message has reasoning and a blank content, the output continues the reasoning. The
    prompt gets the opening marker, `<think>`, unless it ends with it, and the reasoning, escaped; the text is
    the marker alone. Reasoning is not continued if the model has no format for reasoning, if `begins_answer`
    is false, or if the prompt ends with the closing marker.
    """
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return prompt, ""
    content = last["content"]
    thoughts = last.get("reasoning_content")
    form = served.text.reasoning.format
    end = prompt.rstrip()
    # A prompt that ends with the closing marker is of a client that has turned reasoning off.
    if not (form and thoughts and begins_answer) or content.strip() or end.endswith(form.close):
        return prompt, content
    if not end.endswith(form.open.rstrip()):
        prompt += form.open
    return prompt + served.text.tokenizer.escape(thoughts), form.open


def _template_options(chat: ChatRequest, served: Served) -> Json:
    """Returns variables for the template. `chat_template_kwargs` override what follows from the request's
    fields for reasoning, and these fields override the server's variables. Raises ApiError for a name that
    cannot be set.

    Of the fields for reasoning the first with an effort and the first with a switch count, in this order:
    `reasoning_effort`, `enable_thinking`, `think`, `thinking`, `reasoning`. Objects come last.
    """
    escape = served.text.tokenizer.escape
    asked = [chat.reasoning_effort, chat.enable_thinking, chat.think, chat.thinking, chat.reasoning]
    asked += [each for switch in chat.switches for each in (switch.effort, switch.is_on)]
    effort = _first(str, asked)
    variables = template_variables(effort, _first(bool, asked), served.text.template.words)
    options = served.config.template_options | escape(variables) | escape(chat.chat_template_kwargs or {})
    for name in options:
        is_name = name.isidentifier() and not name.startswith("_") and name not in RESERVED
        require(is_name, "chat_template_kwargs", "has a name that cannot be set", given=name[:40])
    return options


def _first(kind: type[V], values: list[Any]) -> V | None:
    """The first value of this type, or None."""
    return next((value for value in values if isinstance(value, kind)), None)


def _template_messages(
    messages: list[Message], template_words: Collection[str], field_names: FieldNames, images: RequestImages
) -> list[Json]:
    """Returns messages as a chat template reads them, the content of each as one text. Adds their images to
    `images`, and logs skipped parts. Raises ApiError without messages, and for a message that is malformed.

    A role must be one of ROLES, or a word that the template has in quotes (`template_words`): templates may
    write any other role next to control tokens. It stays as it is. A system or developer message is left out
    if its content has no readable text; one whose content is empty stays.
    """
    require(len(messages) > 0, field_names.prompt, "cannot be empty")
    reader = ContentReader(CHAT_PARTS, images)
    written = []
    for n, given in enumerate(messages):
        path = field_names.message(n)
        is_known = given.role in ROLES or given.role in template_words
        detail = f"must be one of {', '.join(ROLES)}, or another role that the model's chat template names"
        require(is_known, f"{path}.role", detail, given=given.role[:40])
        message = _template_message(reader, path, given)
        # A system message whose parts are all unreadable is left out. An empty one stays.
        if message["content"] or not given.content or given.role not in SYSTEM_ROLES:
            written.append(message)
    reader.log_skipped()
    return written


def _template_message(reader: ContentReader, path: str, message: Message) -> Json:
    """Returns a message as a chat template reads it, without the fields that are absent. Adds its images to
    those of the reader. Raises ApiError for malformed content or calls, and for a message without content,
    unless it is a tool's or the assistant's, or has calls or reasoning.

    `content` counts before `refusal`, unless it is empty. `reasoning_content` counts before `reasoning`, and
    this before thinking parts in the assistant's content, where no thinking part stays. In a user's or a
    tool's content such parts are plain text. A result without an id has its `name` as the id if its role is
    `function`.
    """
    content = message.content or message.refusal or message.content
    calls = [*_calls_of(path, message)]
    text = reader.text(f"{path}.content", content or "", "", message.role)
    thoughts = message.reasoning_content or message.reasoning
    if message.role == "assistant":
        thoughts = thoughts or "\n".join(THOUGHTS.findall(text)) or None
        text = THOUGHTS.sub("", text)
    elif message.role not in SYSTEM_ROLES:
        text = THOUGHTS.sub(r"\1", text)
    call_id = message.tool_call_id
    if message.role == "function" and call_id is None:
        call_id = message.name  # `function_call` has no other
    # OpenAI's types have null for audio of the assistant, and clients for a tool without a result.
    may_be_empty = calls or thoughts or ALIASES.get(message.role, message.role) in ("assistant", "tool")
    require(content is not None or may_be_empty, path, "needs `content`")
    written = {
        "role": message.role,
        "content": text,
        "name": message.name,
        "tool_call_id": call_id,
        "reasoning_content": thoughts,
        "tool_calls": calls or None,
    }
    return {name: value for name, value in written.items() if value is not None}


def _calls_of(path: str, message: Message) -> Iterator[Json]:
    """Yields the calls of a message, with their arguments as objects; that of `function_call` is the first,
    with its name as its id. A custom tool becomes a function with the argument `input`. Raises ApiError for a
    call without its function or without a name, a custom one without its input, and arguments that are no
    JSON object. Ids are not checked. path: that of the message."""
    if message.function_call is not None:
        function = message.function_call
        call = {"id": function.get("name"), "type": "function", "function": function}
        yield _with_arguments(f"{path}.function_call", call)
    for i, call in enumerate(message.tool_calls or []):
        call_path = f"{path}.tool_calls[{i}]"
        kind = "function"
        if call.get("type") == "custom":
            kind = "custom"
            custom = needed(call_path, call, kind, dict)
            arguments = {"input": needed(f"{call_path}.{kind}", custom, "input", str)}
            function = {"name": custom.get("name"), "arguments": arguments}
            call = {"id": call.get("id"), "type": "function", "function": function}
        yield _with_arguments(f"{call_path}.{kind}", call)


def _with_arguments(path: str, call: Json) -> Json:
    """Returns a tool call with its arguments as an object, which templates expect. path: of its function.
    Raises ApiError for a call without a function, for a function without a name, and for arguments that are
    no JSON object."""
    function = call.get("function")
    require(isinstance(function, dict), path, "is missing, or is not an object")
    needed(path, function, "name", str)  # which templates read, and ids that are made for them
    arguments = arguments_of(f"{path}.arguments", function.get("arguments"))
    return call | {"function": function | {"arguments": arguments}}


def arguments_of(path: str, arguments: Any) -> Json:
    """Returns the arguments of an earlier tool call, given as an object or as JSON in a string. JSON that
    `max_tokens` has truncated gives the members that are complete. No arguments (null, or a blank string) are
    {}. Raises ApiError for any other value."""
    read = _parsed_arguments(arguments) if isinstance(arguments, str) else arguments
    if read is None:
        return {}
    detail = "must be a JSON object: the arguments of a tool call by their names"
    require(
        isinstance(read, dict), path, detail, given=arguments[:40] if isinstance(arguments, str) else None
    )
    return read


def _parsed_arguments(written: str) -> Any:
    """Returns the value of a text in JSON, which may have the mistakes that are read in a model's output. A
    blank text is None; a text that is not JSON is its own value, stripped. An object that is truncated has
    its complete members. If the JSON is a string that has JSON in it, the value is that of the inner JSON."""
    if len(written) > 10_000:
        gevent.sleep(0)  # a history may have many long texts with mistakes, each of which takes 0.2 s
    text = without_surrogates(written.strip().encode()).decode() or "null"
    with contextlib.suppress(ValueError, RecursionError):
        read = whole_value(text, is_partial=text.startswith("{"))
        return whole_value(read) if isinstance(read, str) else read
    return text
