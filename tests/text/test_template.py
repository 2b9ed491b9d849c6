"""Chats are written as transformers' `apply_chat_template` writes them, with the template of the model's folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
import pytest
import templates
import tiny_tokenizers
import tool_calls
from fakes.tokenizer import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from vision_models import FAMILIES

from config import DEMO_MODEL
from run import HERE, ConfigError
from text.template import ChatTemplate, TemplateError, image_mark, images_of

PARTS = [" ", "  ", "\n", "\t", ".", "a", "b", "dog", " the", "é", "e\u0301", "ß", "ع", "€", "日", "𠀀", "😀", "👨‍👩‍👧"]
ANY_TEXT = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)

# Written in the manner of the models they are named after.
TEMPLATES = {
    "llama 2": (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
        "{% else %}{% set system = false %}{% set turns = messages %}{% endif %}"
        "{% for turn in turns %}"
        "{% if (turn['role'] == 'user') != (loop.index0 is even) %}{{ raise_exception('Roles must take turns') }}{% endif %}"
        "{% if loop.first and system %}{% set said = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + turn['content'] %}"
        "{% else %}{% set said = turn['content'] %}{% endif %}"
        "{% if turn['role'] == 'user' %}{{ bos_token + '[INST] ' + said.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + said.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama 3": (
        "{{- bos_token }}\n{%- set ns = namespace(system='', date=strftime_now('%d %b %Y')) %}\n"
        "{%- for message in messages %}\n    {%- if message.role == 'system' %}\n"
        "        {%- set ns.system = message.content | trim %}\n        {%- continue %}\n    {%- endif %}\n"
        "    {%- if ns.system and not ns.told %}\n        {{- 'Today: ' + ns.date + '\\n' + ns.system + '<|eot|>' }}\n"
        "        {%- set ns.told = true %}\n    {%- endif %}\n"
        "    {{- '<|head|>' + message.role + '<|/head|>\\n\\n' + message.content | trim + '<|eot|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|head|>assistant<|/head|>\\n\\n' }}\n{%- endif %}\n"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('No system <message> & such, ' ~ m['content'] | length ~ ' characters') }}"
        "{% elif m['role'] == 'user' %}{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
        "[INST] {{ m['content'] }} [/INST]{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "qwen": (
        "{%- if tools %}\n{{- '<|im_start|>system\\n# Tools\\n' }}\n{%- for tool in tools %}\n"
        "{{- tool | tojson(indent=2, sort_keys=true) + '\\n' }}\n{%- endfor %}\n{%- endif %}\n"
        "{%- set ns = namespace(last=-1) %}\n{%- for m in messages[::-1] %}\n{%- if m.role == 'user' %}\n"
        "{%- set ns.last = loop.revindex0 %}\n{%- break %}\n{%- endif %}\n{%- endfor %}\n"
        "{%- for m in messages %}\n{{- '<|im_start|>' + m.role + (' (last)' if loop.index0 == ns.last else '') }}\n"
        "{{- '\\n' + m.content + '<|im_end|>' + '\\n' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "zephyr": (  # leans on trim_blocks and lstrip_blocks
        "{% for m in messages %}\n  {% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
        "  {% elif m['role'] == 'system' %}\n{{ '<|system|>\n' + m['content'] + eos_token }}\n"
        "  {% else %}\n{{ '<|assistant|>\n' + m['content'] + eos_token }}\n  {% endif %}\n"
        "  {% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n  {% endif %}\n{% endfor %}\n"
    ),
    "for training": (
        "{% for m in messages %}\n{% if m.role == 'assistant' %}\n{% generation %}\n  {% set said = m.content %}\n"
        "A: {{ said }}{{ loop.index }}{{ eos_token }}\n{% endgeneration %}\n({{ said }})\n"
        "{% else %}\n{{ m.role }}: {{ m.content }}{{ said }}{{ pad_token }}{{ nothing }}\n{% endif %}\n{% endfor %}\n"
        "{% if documents is none and tools is none and sep_token is undefined %}\nend{% endif %}"
    ),
    "demo": json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())["chat_template"],
}
USER = {"role": "user", "content": "  Is <b>1 < 2</b> & 'é' an \"emoji\" 😀?\n"}
CHATS = {
    "one question": [USER],
    "with a system message": [{"role": "system", "content": "Be brief. "}, USER],
    "several turns": [USER, {"role": "assistant", "content": "No,\n\n  it is not. "}, {**USER, "content": "Why?"}],
    "out of turn": [USER, USER],
    "an answer to go on with": [USER, {"role": "assistant", "content": "No, because"}],
    "an answer that the user has said before": [{"role": "user", "content": "No"}, {"role": "assistant", "content": "No"}],
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Finds <é> & 'such'", "parameters": {}}}]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture(scope="session")
def transformers_tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level(), **SPECIAL_TOKENS)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_is_written_as_transformers_writes_it(transformers_tokenizer, template, messages, tools):
    to_continue = messages[-1]["role"] == "assistant"
    try:
        expected = transformers_tokenizer.apply_chat_template(
            messages,
            tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=not to_continue,
            continue_final_message=to_continue,
        )
    except jinja2.TemplateError as error:
        with pytest.raises(TemplateError, match=f"^{re.escape(str(error))}$"):
            ChatTemplate(template, SPECIAL_TOKENS).render(messages, tools)
    else:
        assert ChatTemplate(template, SPECIAL_TOKENS).render(messages, tools) == expected


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(content=ANY_TEXT.filter(str.strip), asked=ANY_TEXT)
def test_an_answer_that_is_continued_ends_right_behind_what_it_says(template, content, asked):
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": content}]
    chat = ChatTemplate(template, SPECIAL_TOKENS)
    text = chat.render(messages)
    assert text.endswith(content.lstrip())  # templates may trim its beginning
    assert messages[-1]["content"] == content, "the caller's messages stay as they are"
    if template != TEMPLATES["for training"]:  # which has no generation prompt
        assert text.startswith(chat.render(messages[:-1]).rstrip())


IMAGE, FIRST, SECOND = {"type": "image"}, image_mark(0), image_mark(1)
SHOWN = [  # contents with marks, and the same in parts
    [(f"{FIRST}What is this?", [IMAGE, "What is this?"])],
    [(f"One {SECOND}two{FIRST}", ["One ", IMAGE, "two", IMAGE]), ("three", ["three"]), ("four", ["four"])],
    [(f"{FIRST}{SECOND}", [IMAGE, IMAGE]), ("three", ["three"]), (image_mark(255), [IMAGE])],
    [("One", ["One"]), ("", [""]), ("two", ["two"])],
    [(FIRST, [IMAGE]), ("To be continued", ["To be continued"])],
]


@pytest.mark.models
@pytest.mark.parametrize("contents", SHOWN)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_with_images_is_written_as_transformers_writes_it_in_parts(transformers_tokenizer, name, contents):
    source = FAMILIES[name]().template
    template = ChatTemplate(source, SPECIAL_TOKENS)
    in_parts = ("llava", "llava_next", "llava_onevision", "smolvlm", "idefics3", "paddleocr_vl")
    assert template.takes_parts == (name in in_parts)
    messages, expected = [], []
    for n, (content, parts) in enumerate(contents):
        role = ("user", "assistant")[n % 2]
        messages.append({"role": role, "content": content})
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        expected.append({"role": role, "content": parts if template.takes_parts or images_of(content) else content})
    is_continued = messages[-1]["role"] == "assistant"
    assert template.render(messages) == transformers_tokenizer.apply_chat_template(
        expected,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
    )


def test_the_images_of_a_text_are_found_in_their_order():
    assert images_of("".join(map(image_mark, (3, 0, 255, 0)))) == [3, 0, 255, 0]
    assert images_of("text \udc00 \udcff 😀") == []


def test_templates_of_texts_get_texts_and_their_messages_stay_as_they_are():
    template = ChatTemplate(
        "{{ 'image' }}{% for m in messages %}{{ m.content is string }}{{ m.content | length }}{% endfor %}", {}
    )
    messages = [
        {"role": "user", "content": f"a{FIRST}"},
        {"role": "user", "content": "Quokka"},
        {"role": "user", "content": None},
    ]
    assert template.render(messages[:2]) == "imageFalse2True6"
    assert messages[0] == {"role": "user", "content": f"a{FIRST}"}


def test_whether_a_template_takes_parts_is_asked_of_those_alone_that_name_images(monkeypatch):
    written = []
    monkeypatch.setattr("text.template.rendered", lambda request: written.append(request) or "text")
    ChatTemplate("{{ messages[0].content }}", {}).render([USER])
    assert len(written) == 1
    ChatTemplate("{{ 'image' }}{{ messages[0].content }}", {}).render([USER])
    assert len(written) == 4


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("content", ["", " \n"])
def test_an_answer_that_says_nothing_yet_is_begun(template, content):
    chat = ChatTemplate(template, SPECIAL_TOKENS)
    assert chat.render([USER, {"role": "assistant", "content": content}]) == chat.render([USER])


def test_the_demo_model_reads_tools_their_calls_and_results_as_hermes_models_do():
    def call(name, arguments):
        return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}

    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call("look_up", {"q": "é"}), call("look_up", "")]},
        {"role": "tool", "content": "here", "tool_call_id": "call_1"},
        {"role": "tool", "content": "there", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "Again.", "tool_calls": [call("look_up", {})]},
        {"role": "tool", "content": "nowhere", "tool_call_id": "call_1"},
    ]
    described = (
        "You may call these functions:\n<tools>\n"
        '{"type": "function", "function": {"name": "look_up", "description": "Finds <é> & \'such\'", "parameters": {}}}'
        '\n</tools>\nA call looks like this:\n<tool_call>\n{"name": "the name", "arguments": {}}\n</tool_call>'
    )
    turns = (
        "<|user|>Where?<|assistant|>"
        '<tool_call>\n{"name": "look_up", "arguments": {"q": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call><|endoftext|>'
        "<|user|><tool_response>\nhere\n</tool_response>\n<tool_response>\nthere\n</tool_response>"
        '<|assistant|>Again.\n<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call><|endoftext|>'
        "<|user|><tool_response>\nnowhere\n</tool_response><|assistant|>"
    )
    template = ChatTemplate.load(DEMO_MODEL)
    assert template.render(chat, TOOLS) == f"<|system|>Be brief.\n\n{described}{turns}"
    assert template.render(chat[1:], TOOLS) == f"<|system|>{described}{turns}"
    assert template.render(chat) == f"<|system|>Be brief.{turns}"


def test_an_empty_answer_alone_is_what_the_template_gets():
    chat = ChatTemplate("{{ messages[-1].role }}", {})
    assert chat.render([{"role": "assistant", "content": ""}]) == "assistant"
    assert chat.render([USER, {"role": "assistant", "content": ""}]) == "user"


def test_an_answer_that_is_printed_twice_is_continued_at_the_second_place():
    chat = ChatTemplate("{{ messages[-1].content }} {{ add_generation_prompt }} {{ messages[-1].content }}!", {})
    assert chat.render([USER, {"role": "assistant", "content": "No"}]) == "No False No"


def test_an_answer_that_the_template_does_not_print_cannot_be_continued():
    chat = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(TemplateError, match="does not print the last message of the assistant, so it cannot be continued"):
        chat.render([USER, {"role": "assistant", "content": "No"}])


def write_json(path: Path, content) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_template_comes_from_the_first_place_that_has_one(tmp_path):
    def rendered(*given):
        return ChatTemplate.load(tmp_path, *given).render([USER])

    assert ChatTemplate.load(tmp_path) is None
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "config"})
    assert rendered() == "config"
    write_json(tmp_path / "chat_template.json", {"chat_template": "json"})
    assert rendered() == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja é")
    assert rendered() == "jinja é"
    other = write_json(tmp_path / "other.json", {"chat_template": "other"})
    assert rendered(other) == rendered(str(other)) == "other"


def test_another_tokenizer_config_takes_the_place_of_the_models(tmp_path):
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "config", "eos_token": "E"})
    other = write_json(tmp_path / "other.json", {"bos_token": "B"})
    assert ChatTemplate.load(tmp_path, other) is None
    write_json(tmp_path / "chat_template.json", {"chat_template": "{{ bos_token }}{{ eos_token }}"})
    assert ChatTemplate.load(tmp_path, other).render([USER]) == "B"
    assert ChatTemplate.load(tmp_path).render([USER]) == "E"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}], "r"),
        ([{"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}], None),
        ([{"name": ["default"], "template": "t"}, "x"], "t"),
        ([{"name": "default"}], None),
        ([], None),
        ("", None),
        (None, None),
        ({"default": "d"}, None),
    ],
)
def test_of_several_templates_the_default_one_or_the_only_one_is_taken(tmp_path, value, expected):
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": value})
    chat = ChatTemplate.load(tmp_path)
    assert (chat and chat.render([USER])) == expected


def test_the_template_for_tools_may_be_a_file_beside_the_one_for_chats(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    (tmp_path / "chat_template.jinja").write_text("d")
    chat = ChatTemplate.load(tmp_path)
    assert (chat.render([USER]), chat.for_tools.render([USER])) == ("d", "t")


def test_special_tokens_come_from_the_tokenizer_config_and_those_it_lacks_from_their_own_file(tmp_path):
    shown = "{{ bos_token }} {{ eos_token }} {{ unk_token }} {{ pad_token is defined }} {{ add_bos_token is defined }}"
    config = {"chat_template": shown, "bos_token": {"content": "B"}, "eos_token": "E", "unk_token": None, "add_bos_token": True}
    write_json(tmp_path / "tokenizer_config.json", config)
    assert ChatTemplate.load(tmp_path).render([USER]) == "B E  False False"
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": "other", "unk_token": {"content": "U"}, "pad_token": "P"})
    assert ChatTemplate.load(tmp_path).render([USER]) == "B E U True False"


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff"])
def test_a_tokenizer_config_that_was_asked_for_and_cannot_be_read_is_refused(tmp_path, content):
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        ChatTemplate.load(DEMO_MODEL, path)


def test_a_template_that_is_no_text_is_refused_with_its_name(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read as text"):
        ChatTemplate.load(tmp_path)


def test_threads_may_share_a_chat_template():
    chat = ChatTemplate(TEMPLATES["llama 3"], SPECIAL_TOKENS)
    chats = [[{"role": "user", "content": f"{n} {m}"} for m in range(20)] for n in range(8)]
    expected = [ChatTemplate(TEMPLATES["llama 3"], SPECIAL_TOKENS).render(messages) for messages in chats]
    start, interval = threading.Barrier(8), sys.getswitchinterval()

    def work(messages: list[dict]) -> set[str]:
        start.wait()
        return {chat.render(messages) for _ in range(20)}

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, chats)) == [{text} for text in expected]
    finally:
        sys.setswitchinterval(interval)


def test_a_broken_file_of_a_chat_template_stops_the_boot_with_its_name(tmp_path):
    byte_tokenizer(tmp_path)
    (tmp_path / "mine.json").write_text("{")
    command = [sys.executable, "-m", "text.tokenizer", tmp_path, tmp_path, tmp_path / "mine.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 1
    assert done.stderr.strip().startswith(f"{tmp_path / 'mine.json'} cannot be read as JSON")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_call_of_a_tool_at_the_end_of_a_chat_is_not_lost():
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}{{ m.tool_calls }}]{% endfor %}{{ add_generation_prompt }}", {}
    )
    text = template.render([{"role": "assistant", "content": "", "tool_calls": ["x"]}])
    assert text == "[assistant['x']]True"


def test_the_words_in_quotes_are_what_a_template_may_call_its_roles():
    template = ChatTemplate("{% if m.role in ['ipython', \"critic\"] %}{{ '<|im_end|>' ~ 'a b' }}{% endif %}", {})
    assert template.words >= {"ipython", "critic"}
    assert not template.words & {"<|im_end|>", "a b", "role", "if"}


def test_foreign_ids_are_shortened_in_calls_and_results_where_the_template_requires_it():
    chat = ChatTemplate(tool_calls.TEMPLATES["mistral"], {})
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    ids = ["call_0123456789", "abcDEF123"]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call | {"id": given} for given in ids]},
        *({"role": "tool", "content": "12:00", "tool_call_id": given} for given in ids),
    ]
    written = chat.render(messages, TOOLS)
    first, second = re.findall(r"\[TOOL_RESULTS\] (\w{9})\[", written)
    assert re.findall(r'"id": "(\w{9})"', written) == [first, second]
    assert second == "abcDEF123" and first != second
    assert chat.render(messages, TOOLS) == written
    assert messages[1]["tool_call_id"] == ids[0]


def calling(call):
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_ids_have_the_names_of_functions_where_the_template_writes_them_in_their_place():
    chat = ChatTemplate(tool_calls.TEMPLATES["kimi_k2"], {})
    calls = [
        {"id": given, "type": "function", "function": {"name": name, "arguments": {}}}
        for given, name in (("call_1", "now"), ("call_2", "weather"), ("call_1", "weather"))
    ]
    results = [{"role": "tool", "content": "12:00", "tool_call_id": call["id"]} for call in calls]
    messages = [message for call, result in zip(calls, results, strict=True) for message in (calling(call), result)]
    written = chat.render(messages, TOOLS)
    ids = ["functions.now:0", "functions.weather:1", "functions.weather:2"]
    assert re.findall(r"<\|tool_call_begin\|>([^<]*)", written) == ids
    assert re.findall(r" of ([^<]*)", written) == ids
    assert messages[0]["tool_calls"][0]["id"] == "call_1"


# What a template may do


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages | attr('__len__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update(role='system') %}",
        "{{ messages[0].clear() }}",
        "{{ messages.pop() }}",
    ],
)
def test_a_template_that_reaches_for_more_than_the_chat_is_refused(template):
    messages = [dict(USER)]
    with pytest.raises(TemplateError):
        ChatTemplate(template, {}).render(messages)
    assert messages == [USER]


def test_tojson_has_the_parameters_of_transformers_in_their_order():
    template = ChatTemplate("{{ {'b': 'ä', 'a': '<'} | tojson(true, none, (',', ':'), true) }}", {})
    assert template.render([USER]) == '{"a":"<","b":"\\u00e4"}'


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Only <one> question') }}", "Only <one> question"),
        ("{{ raise_exception(7) }}", "7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", 'can only concatenate str (not "int") to str'),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ nothing | tojson }}", "Object of type Undefined is not JSON serializable"),
        ("{{ messages[0].content.absent.more }}", "'str object' has no attribute 'absent'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{% for n in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% include 'x' %}", "no loader for this environment specified"),
        ("{{ strftime_now(1) }}", "must be str, not int"),
        ("{{ messages | sort(attribute='role') | map('f') | list }}", "No filter named 'f'."),
    ],
)
def test_what_goes_wrong_in_a_template_is_told_in_one_line(template, reason):
    with pytest.raises(TemplateError) as refused:
        ChatTemplate(template, {}).render([USER])
    assert reason in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_messages_of_two_megabytes_fit():
    chat = ChatTemplate.load(DEMO_MODEL)
    message = {"role": "user", "content": "é😀<b>" * 200_000}
    assert len(chat.render([message])) > 1_000_000


def test_a_template_may_multiply():
    template = "{{ 2**10 }} {{ 2**-1 }} {{ '=' * 5 }} {{ 3 * [0] }} {{ 1.5 * 4 }} {{ 'x' * -1 }}"
    assert ChatTemplate(template, {}).render([USER]) == "1024 0.5 ===== [0, 0, 0] 6.0 "


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{", "{% generation %}", "{% nothing %}", "a\n{{ b | f }}", "(" * 9 + "{{" + "(" * 9999]
)
def test_a_template_that_does_not_compile_fails_chats_and_not_the_loading(tmp_path, source):
    (tmp_path / "chat_template.jinja").write_text(source)
    chat = ChatTemplate.load(tmp_path)
    for _ in range(2):
        with pytest.raises(TemplateError) as refused:
            chat.render([USER])
        assert len(str(refused.value).splitlines()) == 1


LOOK = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
TURNS = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "How is the weather?"},
    {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [LOOK]},
    {"role": "tool", "content": "blue"},
    {"role": "assistant", "content": "Fine.", "reasoning_content": "Blue is fine."},
    {"role": "user", "content": "And tomorrow?"},
    {"role": "assistant", "content": "Rain.", "reasoning_content": "I guess."},
    {"role": "user", "content": "Thanks."},
]


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "Qwen3-Next-Thinking", "llama3_1", "gemma3", "smollm2"]
)
def test_the_prompt_of_each_request_goes_on_at_a_border_of_an_earlier_one(name):
    template = {**templates.with_rules(), **templates.published()}.get(name) or templates.collected(name)
    if template is None:
        pytest.skip("this template is not installed")
    turns = (
        TURNS if name.startswith(("qwen", "Qwen")) else [turn for turn in TURNS if turn["role"] != "tool" and turn["content"]]
    )
    begun: set[str] = set()
    for end, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        chat = turns[:end]
        prompt = template.render(chat)
        beginnings = {prompt[:border] for border in template.borders(prompt, chat)}
        assert all(prompt.startswith(each) for each in beginnings) and beginnings
        reused = max((len(each) for each in begun if prompt.startswith(each)), default=0)
        if begun:
            # Of what stands before the newest message of the user, at most the response before it is run again.
            newest = max(n for n, each in enumerate(chat) if each["role"] == "user")
            before = max(n for n in range(newest) if chat[n]["role"] == "user") if newest > 1 else newest
            assert reused >= prompt.index(chat[before]["content"]) + len(chat[before]["content"])
        begun |= beginnings
    other = [*turns[:1], {"role": "user", "content": "Something else"}]
    prompt = template.render(other)
    shared = max(len(each) for each in begun if prompt.startswith(each))
    assert shared >= prompt.index("Answer briefly.") + len("Answer briefly."), "other chats begin with the system prompt"


def test_a_template_that_rejects_a_chat_which_ends_with_an_answer_keeps_the_border_before_the_response():
    rejecting = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    template = ChatTemplate(
        rejecting + "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}:{% endif %}", {}
    )
    prompt = template.render([USER])
    assert template.borders(prompt, [USER]) == [1, len(prompt) - 1]


@pytest.mark.parametrize("given", [{}, {"id": None}])
def test_calls_without_ids_get_ids_of_their_own_where_a_template_needs_short_ones(given):
    template = ChatTemplate(
        "[TOOL_CALLS]{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }} {% endfor %}{% endfor %}", {}
    )
    calls = [given | {"type": "function", "function": {"name": "f", "arguments": {}}}] * 2
    chat = [USER | {"tool_calls": []}, {"role": "assistant", "content": "", "tool_calls": calls}]
    first, second = template.render(chat).removeprefix("[TOOL_CALLS]").split()
    assert len(first) == len(second) == 9 and first != second
