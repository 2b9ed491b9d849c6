"""Published tokenizers and chat templates (tests/package.json): ids and texts as the library gives them, chats as transformers
writes them."""

import functools
import json

import jinja2
import pytest
import templates
import tiny_tokenizers
import tokenizers

from text.stream import detokenizer_for
from text.template import ChatTemplate, TemplateError
from text.tokenizer import Tokenizer

FOLDERS = {path.parent.name.removeprefix("tokenizer-"): path for path in sorted(templates.FOLDER.glob("*/models"))}

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(not FOLDERS, reason="make test could not install the published tokenizers by npm"),
]

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  two  blanks, a\ttab\nand lines\n\n\n",
    "naïve café, déjà vu; e\u0301",
    "日本語のテキストと中文和한국어",
    "🙂🙃👨\u200d👩\u200d👧 and 𠀀",
    "def f(x):\n    return {'a': [1, 2.5e-3]}\n",
    "مرحبا بالعالم, שלום, Привет",
    "0123456789 1,000,000 3.14159",
    "<html><b>&amp;</b></html>",
    "",
]
SYSTEM = {"role": "system", "content": "Be brief. "}
USER = {"role": "user", "content": "  Is <b>1 < 2</b> & 'é' an \"emoji\" 😀?\n"}
ANSWER = {"role": "assistant", "content": "No,\n\n  it is not. "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefgh1", "type": "function", "function": {"name": "look_up", "arguments": {"what": "é & <b>", "n": 2}}},
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "look_up", "content": "Nothing."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Finds <é> & 'such'",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
CHATS = {
    "question": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, USER],
    "system, turns": [SYSTEM, USER, ANSWER, USER],
    "two users": [USER, USER],
    "continued": [USER, {"role": "assistant", "content": "No, because"}],
    "result": [USER, CALL, RESULT],
    "result, answer, user": [USER, CALL, RESULT, ANSWER, USER],
    "system, result": [SYSTEM, USER, CALL, RESULT],
}
CASES = [
    pytest.param(messages, tools, id=f"{name}{', tools' if tools else ''}")
    for name, messages in CHATS.items()
    for tools in (None, TOOLS)
]


BOS = {"deepseek_v3": [0]}  # what tokenizer_config.json adds, and tokenizer.json does not


@functools.cache
def raw(name):
    return tokenizers.Tokenizer.from_file(str(FOLDERS[name] / "tokenizer.json"))


@functools.cache
def ours(name):
    return Tokenizer(FOLDERS[name])


@functools.cache
def of_transformers(name):
    """Its own class for any tokenizer.json: the classes by name change some of the texts. For chats any tokens do."""
    from transformers import PreTrainedTokenizerFast

    config = json.loads((FOLDERS[name] / "tokenizer_config.json").read_text())
    special = {
        key: value for key, value in config.items() if key in ("bos_token", "eos_token", "unk_token", "pad_token") and value
    }
    special = {key: value["content"] if isinstance(value, dict) else value for key, value in special.items()}
    tokens = tiny_tokenizers.byte_level()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, chat_template=config.get("chat_template"), **special)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_librarys_and_a_stream_is_the_decoded_text(name, text):
    ids = raw(name).encode(text, add_special_tokens=False).ids
    assert ours(name).encode(text, add_special_tokens=False) == ids
    assert ours(name).encode(text) == [*BOS.get(name, []), *raw(name).encode(text).ids]
    prompt = raw(name).encode("Hello", add_special_tokens=False).ids
    stream = detokenizer_for(ours(name), prompt)
    streamed = "".join([*map(stream.push, ids), stream.finish()])
    assert raw(name).decode(prompt) + streamed == raw(name).decode([*prompt, *ids])


def test_a_text_is_split_as_mistral_trained_where_its_files_have_the_words_of_llama_3(tmp_path):
    """As those of Mistral Small 3.1 do."""
    vocabulary = json.loads((FOLDERS["mistral_nemo"] / "tokenizer.json").read_text())
    of_llama, of_mistral = (raw(name).pre_tokenizer for name in ("llama3_1", "mistral_nemo"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary | {"pre_tokenizer": json.loads(of_llama.__getstate__())}))
    found = Tokenizer(tmp_path)
    for text in [*TEXTS, "हिन्दी भाषा"]:
        assert found.encode(text) == raw("mistral_nemo").encode(text).ids
    assert of_llama.pre_tokenize_str(text) != of_mistral.pre_tokenize_str(text)


@pytest.mark.parametrize(
    "name", [name for name, path in FOLDERS.items() if "chat_template" in (path / "tokenizer_config.json").read_text()]
)
@pytest.mark.parametrize(("messages", "tools"), CASES)
def test_a_chat_is_written_as_transformers_writes_it(name, messages, tools):
    template = ChatTemplate.load(FOLDERS[name])
    is_continued = messages[-1]["role"] == "assistant"
    try:
        expected = of_transformers(name).apply_chat_template(
            messages, tools, tokenize=False, add_generation_prompt=not is_continued, continue_final_message=is_continued
        )
    except (jinja2.TemplateError, TypeError) as error:
        with pytest.raises(TemplateError):
            template.render(messages, tools)
        assert error
    else:
        assert template.render(messages, tools) == expected
