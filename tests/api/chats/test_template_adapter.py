"""Nothing that a client said disappears, whatever the chat template takes."""

import itertools
import json
import random
import re
import time

import pytest
import templates
from hypothesis import settings

from api.chats.template_adapter import adapt_to_template
from text.template_capabilities import TemplateCapabilities

TEMPLATES = templates.with_rules() | templates.published()
CHATS = settings.default.max_examples  # of each template
CLOSING = 32  # tokens after what was said last, which the next turn may write in another way


class Words:
    """Words that occur once."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.said = []

    def say(self):
        self.said.append(f"w{self.random.randrange(10**12)}w")
        return self.said[-1]

    def message(self, role, **more):
        return {"role": role, "content": self.say(), **more}

    def calls(self, speaks):
        """A message with one call or two, and their results."""
        content = self.say() if speaks else ""
        calls = []
        for n in range(1, self.random.choice([2, 2, 3])):
            function = {"name": self.say(), "arguments": {"key": self.say()}}
            calls.append({"id": f"abcdefgh{n}", "type": "function", "function": function})
        results = [self.message(self.random.choice(["tool", "function"]), tool_call_id=call["id"], name="f") for call in calls]
        return {"role": "assistant", "content": content, "tool_calls": calls}, results

    def chat(self, speaks=True):
        """Every role and part that a client may send, in every order that makes sense. speaks: also in messages with
        calls."""
        draw = self.random
        messages = [self.message(draw.choice(["system", "developer"])) for _ in range(draw.randrange(3))]
        turns = draw.randrange(1, 5)
        for turn in range(turns):
            for _ in range(draw.choice([1, 1, 2])):
                messages.append(self.message(draw.choice(["user", "user", "ctx"])))
            messages += self.later_system()
            if draw.random() < 0.3:
                for _ in range(draw.choice([1, 1, 2, 3])):
                    message, results = self.calls(speaks and draw.random() < 0.5)
                    messages += [message, *self.later_system(), *results, *self.later_system()]
                if draw.random() < 0.7:
                    messages.append(self.message("assistant"))
            elif turn < turns - 1:
                for _ in range(draw.choice([1, 1, 2])):
                    messages.append(self.message("assistant"))
            messages += self.later_system()
        return messages

    def later_system(self):
        draw = self.random
        count = draw.choice([0, 0, 0, 0, 1, 2])
        return [self.message(draw.choice(["system", "developer"])) for _ in range(count)]

    def tools(self):
        function = {"name": self.say(), "description": self.say(), "parameters": {"type": "object", "properties": {}}}
        return [{"type": "function", "function": function}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_word_of_every_role_and_part_is_in_the_prompt(name):
    template = TEMPLATES[name]
    capabilities = TemplateCapabilities.of(template)
    for seed in range(CHATS):
        words = Words(seed)
        messages = words.chat()
        tools = words.tools() if seed % 2 else None
        prompt = prompt_of(messages, tools, template, capabilities)
        lost = [word for word in words.said if word not in prompt]
        assert not lost, json.dumps(messages, indent=1)


def prompt_of(messages, tools, template, capabilities):
    written = adapt_to_template(messages, tools, capabilities)
    used = template.for_tools if tools else template
    return used.render(written, tools if capabilities.tools else None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_that_grows_keeps_its_prompt_which_may_be_cached(name):
    template = TEMPLATES[name]
    capabilities = TemplateCapabilities.of(template)
    for seed in range(CHATS):
        words = Words(seed)
        # Where a turn has one text, it moves behind the turn's calls.
        messages = words.chat(speaks=capabilities.assistants or capabilities.text_of_calls)
        # Mistral Nemo's template writes the tools before the newest user message.
        tools = words.tools() if seed % 2 and name != "mistral_nemo" else None
        before = None
        for n, message in enumerate([*messages[1:], {"role": "assistant"}], 1):
            if message["role"] != "assistant" or messages[n - 1]["role"] == "assistant":
                continue
            prompt = prompt_of(messages[:n], tools, template, capabilities)
            if before is not None:
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt))
                kept = "".join(character for character, _ in same)
                lost = re.findall(r"\w+|\W", before[len(kept) :])
                is_said = [word for word in words.said if word in before and word not in kept]
                assert len(lost) <= CLOSING and not is_said, json.dumps(messages[:n], indent=1)
            before = prompt


def said(*pairs):
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[role], "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("lacking", "chat", "written"),
    [
        (["users"], said("uA", "uB", "aC", "uD"), said(("u", "A\n\nB"), "aC", "uD")),
        (["assistants"], said("uA", "aB", "aC", "uD"), said("uA", ("a", "B\n\nC"), "uD")),
        (["several_system"], said("sA", "sB", "uC"), said(("s", "A\n\nB"), "uC")),
        (["later_system"], said("uA", "sB", "uC"), said(("u", "A\n\nB"), "uC")),
        (["later_system"], said("uA", "aB", "sC", "uD"), said("uA", "aB", ("u", "C\n\nD"))),
        (["later_system"], said("uA", "aB", "sC", "aD"), said("uA", "aB", "uC", "aD")),
        (["later_system"], said("uA", "aB", "sC", "sD"), said("uA", "aB", ("u", "C\n\nD"))),
        (["later_system"], said("uA", "aB", "tC", "sD", "uE"), said("uA", "aB", ("t", "C\n\nD"), "uE")),
        (["later_system"], said("uA", "aB", "sC", "tD"), said("uA", "aB", ("t", "C\n\nD"))),
        (["later_system"], said("sA"), said("uA")),
        (["later_system", "several_system"], said("sA", "sB", "uC", "sD"), said(("s", "A\n\nB"), ("u", "C\n\nD"))),
        (["later_system", "several_system"], said("dA", "sB", "uC", "dD"), said(("s", "A\n\nB"), ("u", "C\n\nD"))),
        (["system"], said("sA", "sB", "uC", "aD", "uE"), said(("u", "A\n\nB\n\nC"), "aD", "uE")),
        (["system"], said("sA"), said("uA")),
        (["system"], said("sA", "aB", "uC"), said("uA", "aB", "uC")),
    ],
)
def test_texts_that_a_template_takes_in_one_message_have_a_blank_line_between_them(lacking, chat, written):
    assert adapt_to_template(chat, None, TemplateCapabilities(**dict.fromkeys(lacking, False))) == written
    assert adapt_to_template(chat, None, TemplateCapabilities(developer=True)) == chat


def test_developers_are_in_the_head_of_a_template_that_names_them():
    capabilities = TemplateCapabilities(developer=True, several_system=False, later_system=False)
    written = adapt_to_template(said("dA", "sB", "uC", "aD", "dE", "uF"), None, capabilities)
    assert written == said(("d", "A\n\nB"), "uC", "aD", ("u", "E\n\nF"))


def test_neighbours_that_become_one_keep_what_was_thought_and_called():
    calls = [{"id": str(n), "type": "function", "function": {"name": "f", "arguments": {}}} for n in (1, 2)]
    one = {"role": "assistant", "content": "A", "reasoning_content": "Hm.", "tool_calls": calls[:1]}
    other = {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": calls[1:]}
    joined = {"role": "assistant", "content": "A", "reasoning_content": "Hm.\n\nSo.", "tool_calls": calls}
    assert adapt_to_template([one, other], None, TemplateCapabilities(assistants=False)) == [joined]


def test_answers_that_become_one_with_the_text_of_calls_keep_what_was_thought():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    calls = {"role": "assistant", "content": "A", "tool_calls": [call]}
    result = {"role": "tool", "content": "R", "tool_call_id": "1"}
    first = {"role": "assistant", "content": "B", "reasoning_content": "Hm."}
    last = {"role": "assistant", "content": "C", "reasoning_content": "So."}
    chat = [*said("uQ"), calls, result, first, *said("sS"), last]
    written = adapt_to_template(chat, None, TemplateCapabilities(assistants=False, text_of_calls=False))
    joined = {"role": "assistant", "content": "A\n\nB\n\nC", "reasoning_content": "Hm.\n\nSo."}
    assert written == [*said("uQ"), calls | {"content": ""}, result, *said("sS"), joined]


def test_calls_of_one_message_get_one_each_where_a_template_writes_no_more():
    calls = [{"id": str(n), "type": "function", "function": {"name": "f", "arguments": {}}} for n in range(4)]
    both = {"role": "assistant", "content": "A", "reasoning_content": "Hm.", "tool_calls": calls[:3]}
    results = [{"role": "tool", "content": f"R{n}", "tool_call_id": str(n)} for n in range(4)]
    alone = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
    first = both | {"tool_calls": calls[:1]}
    lacking = TemplateCapabilities(several_calls=False)
    chat = [*said("uQ"), both, results[1], results[0], *said("uX"), alone[3], results[3]]
    written = [*said("uQ"), first, alone[1], results[1], results[0], alone[2], *said("uX"), alone[3], results[3]]
    assert adapt_to_template(chat, None, lacking) == written
    assert adapt_to_template(chat, None, TemplateCapabilities()) == chat
    assert adapt_to_template([both], None, lacking) == [first, *alone[1:3]]
    assert adapt_to_template([results[0]], None, lacking) == [results[0]]
    # Calls whose ids are the same, as some clients write them.
    same = [message | {"tool_calls": [calls[0]]} for message in (both, alone[0], alone[0])]
    chat = [both | {"tool_calls": [calls[0]] * 3}, results[0], results[0], results[0]]
    assert adapt_to_template(chat, None, lacking) == [message for call in same for message in (call, results[0])]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_that_every_template_takes_is_left_as_it_is(name):
    messages = [{"role": role, "content": f"text {n}"} for n, role in enumerate(["user", "assistant", "user"])]
    assert adapt_to_template(messages, None, TemplateCapabilities.of(TEMPLATES[name])) == messages


def test_published_templates_take_what_their_models_were_trained_on():
    found = {name: TemplateCapabilities.of(template) for name, template in templates.published().items()}
    if not found:
        pytest.skip("no published templates: npm could not install them")
    assert not found["gemma3"].several_system and not found["gemma3"].users
    assert found["qwen3"].tools and not found["qwen3"].developer
    assert not found["mistral_nemo"].users and found["mistral_nemo"].calls


def test_calls_are_written_one_by_one_in_time_that_grows_with_their_number():
    ids = [f"{n}" for n in range(15_000)]
    calls = [{"id": each, "function": {"name": "f", "arguments": {}}} for each in ids]
    results = [{"role": "tool", "content": each, "tool_call_id": each} for each in reversed(ids)]
    started_at = time.thread_time()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    written = adapt_to_template(messages, None, TemplateCapabilities(several_calls=False))
    assert time.thread_time() - started_at < 3  # 0.1 on an idle processor; 10 where each result looks at each call
    pairs = [(call["tool_calls"][0]["id"], result["content"]) for call, result in zip(written[2::2], written[3::2])]
    assert pairs == [(each, each) for each in ids[:0:-1]]
