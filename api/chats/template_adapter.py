"""Adapts a chat to the model's template: roles that it does not support, consecutive messages of one role,
tools and calls that it has no place for. No text, image or call that a client sent is dropped: it is written
in another place, or rejected by name.

Messages here have the form that a template reads: `role`, `content` as one text, `name`, `tool_calls` with
arguments as objects, `tool_call_id`, `reasoning_content`.
"""

from __future__ import annotations

import functools
import itertools
import json

from api.chats.content import SYSTEM_ROLES
from api.chats.tools import definitions
from api.http.fields import Json
from text.template import image_mark, images_of
from text.template_capabilities import TemplateCapabilities

TemplateMessage = Json
Messages = list[TemplateMessage]

# Clients' own roles, and older names.
ALIASES = {"developer": "system", "function": "tool", "ctx": "user", "msg": "user"}
HEARD_ROLES = ("user", "tool")  # of what the assistant answers
APART = "\n\n"  # between texts that become one message
IMAGE_APART = "[image]"  # in the place of an image that is in a message of its own
TOOLS_PROMPT = """You may call these functions. Each line describes one as JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON between these tags, one pair of tags a call:
<tool_call>
{{"name": "the name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result of a call follows between <tool_response> and </tool_response>."""


def adapt_to_template(
    messages: Messages, tools: list[Json] | None, capabilities: TemplateCapabilities
) -> Messages:
    """Returns the messages as a template with these capabilities can write them. The given messages stay as
    they are. No text, image or call is dropped; names and ids may be, where messages become text or parts of
    others. Empty messages are added where a template needs one.

    tools: functions in a chat's form; None: none. If the template has no place for tools, a system message
    about them is added at the beginning. If the template has no place for calls, calls and results become
    text.
    """
    messages = [_with_known_role(message, capabilities) for message in messages]
    if not capabilities.calls:
        messages = [_in_text(message) for message in messages]
    if tools and not capabilities.tools:
        prompt = TOOLS_PROMPT.format(tools=definitions(tools))
        messages = [{"role": "system", "content": prompt}, *messages]
    messages = _with_images_apart(messages, capabilities)
    messages = _merged_roles(_with_system(messages, capabilities), capabilities)
    if capabilities.calls and not capabilities.text_of_calls:
        messages = _with_text_apart(messages, capabilities)
    if capabilities.calls and not capabilities.several_calls:
        messages = _with_calls_apart(messages)
    if capabilities.calls and not capabilities.user_after_result:
        messages = _with_answers(messages)
    return [_with_thinking(message, capabilities) for message in messages]


def _with_thinking(message: TemplateMessage, capabilities: TemplateCapabilities) -> TemplateMessage:
    """Returns the message with its reasoning also as `thinking`, the name in the templates of LFM2.5 and
    gpt-oss. A message with content stays as it is unless the template supports both: that of gpt-oss rejects
    them."""
    if "reasoning_content" not in message or (message["content"] and not capabilities.thinking):
        return message
    return message | {"thinking": message["reasoning_content"]}


def _with_known_role(message: TemplateMessage, capabilities: TemplateCapabilities) -> TemplateMessage:
    """Returns the message with the usual name of its role (ALIASES). `developer` stays if the template
    supports it; so does a role without another name."""
    role = message["role"]
    if role == "developer" and capabilities.developer:
        return message
    return message | {"role": ALIASES.get(role, role)}


def _in_text(message: TemplateMessage) -> TemplateMessage:
    """Returns the calls of a message, or a tool's result, as text in the form that TOOLS_PROMPT asks for.
    Calls follow the content; a result becomes a user message. Ids and the name of a result are not written.
    Any other message stays as it is."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]]
    for call in calls:
        written = {name: call["function"].get(name) for name in ("name", "arguments")}
        texts.append(f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>")
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return kept | {"content": "\n".join(filter(None, texts))}


def _with_images_apart(messages: Messages, capabilities: TemplateCapabilities) -> Messages:
    """Returns the messages with images moved out of messages in whose role the template writes none, into
    user messages of their own. The text IMAGE_APART takes the place of each image.

    The user message follows the message that had the images, and the tool results and system messages behind
    that message. Images of a last message of the assistant, which is continued, go in front of that message.
    Example: call, result with an image, result, answer becomes call, result, result, user with the image,
    answer.
    """
    apart = []
    marks = ""  # of images that wait for their place
    for message in messages:
        role = message["role"]
        if marks and role not in ("tool", *SYSTEM_ROLES):
            apart.append({"role": "user", "content": marks})
            marks = ""
        if role not in capabilities.image_roles:
            for number in images_of(message["content"]):
                mark = image_mark(number)
                message = message | {"content": message["content"].replace(mark, IMAGE_APART)}
                marks += mark
        apart.append(message)
    if marks:
        is_continued = messages[-1]["role"] == "assistant"
        apart.insert(len(apart) - is_continued, {"role": "user", "content": marks})
    return apart


def _with_system(messages: Messages, capabilities: TemplateCapabilities) -> Messages:
    """Returns the messages with system messages only where the template supports them.

    System messages at the beginning stay. They become one message if the template supports only one; if it
    supports none, they become the beginning of the user message behind them, or a user message of their own.
    Later ones stay, or are folded (`_with_folded_system`), but never go to the front: a chat that grows keeps
    its prefix, which may be cached. If the template needs a user message, a chat without any gets an empty
    one behind the first system messages.

    A chat of system messages alone gets no empty message. Its system messages become a user message, unless
    the template supports system messages both at the beginning and later.

    Example, for a template without system messages: system A, user B, assistant, user C, system D → user A
    and B, assistant, user C and D.
    """
    head = list(itertools.takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
    others = messages[len(head) :]
    if not capabilities.later_system:
        others = _with_folded_system(others)
    if others and not capabilities.no_user and all(message["role"] != "user" for message in others):
        others = [{"role": "user", "content": ""}, *others]
    # Some templates write a system message only with the one that follows it.
    takes_system = capabilities.system and (others or capabilities.later_system)
    if not head or (takes_system and (len(head) == 1 or capabilities.several_system)):
        return [*head, *others]
    text = APART.join(message["content"] for message in head)
    if takes_system:
        return [head[0] | {"content": text}, *others]
    if others and others[0]["role"] == "user":
        return [_joined_messages({"content": text}, others[0]), *others[1:]]
    return [{"role": "user", "content": text}, *others]


def _with_folded_system(messages: Messages) -> Messages:
    """Returns the messages without system messages. The text of a system message goes into the user message
    or tool result directly before it, else into one directly after it, else into a user message of its own.

    Example: system A, assistant, system B, user C → user A, assistant, user B and C.
    """
    folded = []
    is_apart = False  # the last one has only the text of system messages
    for message in messages:
        text = {"content": message["content"]}
        is_system = message["role"] in SYSTEM_ROLES
        if is_system and folded and folded[-1]["role"] in HEARD_ROLES:
            folded[-1] = _joined_messages(folded[-1], text)
            continue
        if is_apart and message["role"] in HEARD_ROLES:
            message = _joined_messages({"content": folded.pop()["content"]}, message)
        folded.append({"role": "user"} | text if is_system else message)
        is_apart = is_system
    return folded


def _merged_roles(messages: Messages, capabilities: TemplateCapabilities) -> Messages:
    """Returns the messages, with consecutive ones of the user as one, and consecutive ones of the assistant
    as one. Those of a role stay apart if the template supports two of that role in a row."""
    apart = {"user": capabilities.users, "assistant": capabilities.assistants}
    merged = []
    for message in messages:
        role = message["role"]
        if merged and merged[-1]["role"] == role and not apart.get(role, True):
            merged[-1] = _joined_messages(merged[-1], message)
        else:
            merged.append(message)
    return merged


def _with_text_apart(messages: Messages, capabilities: TemplateCapabilities) -> Messages:
    """Returns the messages without text beside calls: such text becomes an assistant message in front of the
    calls, where the reasoning stays. If the template does not support two assistant messages in a row, all
    text of a turn is in one message (`_with_one_text`)."""
    if not capabilities.assistants:
        return [message for turn in _turns(messages) for message in _with_one_text(turn)]
    apart = []
    for message in messages:
        if _has_calls(message) and message["content"]:
            apart.append({"role": "assistant", "content": message["content"]})
            message = message | {"content": ""}
        apart.append(message)
    return apart


def _turns(messages: Messages) -> list[Messages]:
    """Returns the messages in groups, each of which begins with a user message. In front of these is a group
    of the messages before the first user message, which may be empty."""
    turns: list[Messages] = [[]]
    for message in messages:
        if message["role"] == "user":
            turns.append([])
        turns[-1].append(message)
    return turns


def _with_one_text(turn: Messages) -> Messages:
    """Returns a turn with all text of the assistant in one message. In it are the messages without calls,
    with their reasoning, at the place of the last of them; a turn that has none gets a new message in front
    of its first call. Text behind calls may move in front of them. A turn without calls, or without text,
    stays as it is.

    Example: text A with call 1, result 1, text B → call 1, result 1, text A and B.
    """
    spoken = [n for n, message in enumerate(turn) if message["role"] == "assistant"]
    plain = [n for n in spoken if not _has_calls(turn[n])]
    texts = [turn[n]["content"] for n in spoken if turn[n]["content"]]
    if len(plain) == len(spoken) or not texts:
        return turn
    place = plain[-1] if plain else spoken[0]
    answer = functools.reduce(
        _joined_messages, (turn[n] for n in plain), {"role": "assistant", "content": ""}
    )
    written = []
    for n, message in enumerate(turn):
        if n == place:
            written.append(answer | {"content": APART.join(texts)})
        if _has_calls(message):
            written.append(message | {"content": ""})
        elif n not in plain:
            written.append(message)
    return written


def _has_calls(message: TemplateMessage) -> bool:
    return message["role"] == "assistant" and bool(message.get("tool_calls"))


def _with_calls_apart(messages: Messages) -> Messages:
    """Returns the messages with one call each. The first call keeps the content and the reasoning. A further
    call moves in front of the result with its id; without such a result, in front of the next message that is
    no result, or to the end.

    Example: calls 1 and 2, result 1, result 2 become call 1, result 1, call 2, result 2.
    """
    apart = []
    waiting: dict[str, Messages] = {}  # further calls of a message, by their ids
    for message in messages:
        if message["role"] != "tool":
            apart += itertools.chain(*waiting.values())
            waiting = {}
        if _has_calls(message):
            first, *others = message["tool_calls"]
            for call in others:
                further = {"role": "assistant", "content": "", "tool_calls": [call]}
                waiting.setdefault(str(call.get("id")), []).append(further)
            message = message | {"tool_calls": [first]}
        answered = message.get("tool_call_id")
        is_last = apart and _has_calls(apart[-1]) and apart[-1]["tool_calls"][0].get("id") == answered
        if not is_last and waiting.get(answered):
            apart.append(waiting[answered].pop(0))
        apart.append(message)
    return [*apart, *itertools.chain(*waiting.values())]


def _with_answers(messages: Messages) -> Messages:
    """Returns the messages with an empty assistant message where a user message follows a tool result. A turn
    in which the assistant has a message without calls stays as it is."""
    turns = _turns(messages)
    for turn in turns[1:-1]:  # the first one precedes all user messages; none follows the last one
        has_spoken = any(message["role"] == "assistant" and not _has_calls(message) for message in turn)
        if turn[-1]["role"] == "tool" and not has_spoken:
            turn.append({"role": "assistant", "content": ""})
    return [message for turn in turns for message in turn]


def _joined_messages(one: TemplateMessage, other: TemplateMessage) -> TemplateMessage:
    """Returns two messages as one, with the text, the reasoning and the calls of both. Of other fields, such
    as the role, the value in `other` counts before that in `one`."""
    joined = one | other
    for name in ("content", "reasoning_content"):
        texts = [message[name] for message in (one, other) if message.get(name)]
        if texts or name == "content":
            joined[name] = APART.join(texts)
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    return joined
