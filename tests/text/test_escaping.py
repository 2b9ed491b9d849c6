"""With --escape-special-tokens what clients write is text: no special token comes of it, and none of it is lost. Image tokens
are never theirs to write.
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path

import pytest
import tiny_tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import save
from tokenizers import AddedToken

from config import DEMO_MODEL
from text.template import image_mark
from text.tokenizer import Tokenizer

# These write any text with other tokens, and give it back as it was.
LOSSLESS = ["byte-level", "byte-level-with-added", "llama", "gemma", "demo"]


@functools.cache
def tokenizers_of(name: str) -> tuple[Tokenizer, Tokenizer]:
    """Without the option and with it."""
    folder = DEMO_MODEL
    if name != "demo":
        folder = save(tiny_tokenizers.KINDS[name](), Path(tempfile.mkdtemp()))
    return Tokenizer(folder), Tokenizer(folder, escapes=True)


def names_of(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.id_to_token(i) for i in sorted(tokenizer.special_ids)]


@st.composite
def texts(draw, name: str) -> str:
    """Of special tokens and pieces of them, between other characters."""
    names = names_of(tokenizers_of(name)[0])
    pieces = [piece for name in names for at in range(1, len(name)) for piece in (name[:at], name[at:])]
    others = ["a", " the", "<", "|", ">", " ", "\n", "é", "😀", "<think>"]
    parts = st.one_of(st.sampled_from(names), st.sampled_from(pieces), st.sampled_from(others))
    return "".join(draw(st.lists(parts, max_size=8)))


def specials_in(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if i in tokenizer.special_ids]


@pytest.mark.parametrize("name", LOSSLESS)
@given(data=st.data())
def test_text_of_a_client_has_no_special_token_and_reads_as_it_was_written(name, data):
    plain, escaping = tokenizers_of(name)
    text = data.draw(texts(name))
    ids = escaping.encode(escaping.escape(text), add_special_tokens=False)
    assert specials_in(plain, ids) == []
    assert plain.decode(ids) == text
    assert escaping.unescape(escaping.escape(text)) == text


@pytest.mark.parametrize("name", LOSSLESS)
@given(data=st.data())
def test_the_special_tokens_of_a_chat_are_those_of_its_template(name, data):
    plain, escaping = tokenizers_of(name)
    first, last = names_of(plain)[0], names_of(plain)[-1]
    halved = data.draw(st.sampled_from(names_of(plain)))
    at = data.draw(st.integers(1, len(halved) - 1))
    begin, end = escaping.escape([data.draw(texts(name)) + halved[:at], halved[at:] + data.draw(texts(name))])
    chat = f"{first}{begin}{end}{last} x"  # the two next to each other: together they look like one
    ids = escaping.encode(chat, add_special_tokens=False)
    assert specials_in(plain, ids) == [plain.token_to_id(first), plain.token_to_id(last)]
    shown = escaping.unescape(chat).encode()
    spans = escaping.spans(chat, add_special_tokens=False)
    assert [i for i, _start, _end in spans] == ids
    assert [shown[start:end].decode() for i, start, end in spans if i in plain.special_ids] == [first, last]


@pytest.mark.parametrize("name", [*tiny_tokenizers.KINDS, "demo"])
@given(data=st.data())
def test_text_that_is_not_escaped_is_encoded_as_without_the_option(name, data):
    plain, escaping = tokenizers_of(name)
    text = data.draw(texts(name))
    assert escaping.encode(text) == plain.encode(text)
    assert escaping.spans(text, add_special_tokens=False) == plain.spans(text, add_special_tokens=False)


@pytest.mark.parametrize("name", tiny_tokenizers.KINDS)
@given(data=st.data())
def test_a_tokenizer_that_knows_a_special_token_as_a_word_refuses_the_text(name, data):
    plain, escaping = tokenizers_of(name)
    unknown = plain.token_to_id("<unk>")
    try:
        ids = escaping.encode(escaping.escape(data.draw(texts(name))), add_special_tokens=False)
    except ValueError as error:
        assert "cannot encode" in str(error) and name in ("metaspace-unigram", "word-level")
    else:
        assert set(specials_in(plain, ids)) <= {unknown}


def test_messages_and_tools_are_escaped_in_all_their_texts_and_nothing_else():
    escape = tokenizers_of("demo")[1].escape
    value = {"a<|user|>": ["<|user|>", {"b": "x<|user|>y<|us"}], "n": [1, 2.5, None, True], "t": "<|use r|>"}
    escaped = escape(value)
    ((key, (first, second)), *others) = escaped.items()
    changed = [(key, "a<|user|>"), (first, "<|user|>"), (second["b"], "x<|user|>y<|us")]
    assert all(text != written and len(text) == len(written) for text, written in changed)
    assert dict(others) == {"n": value["n"], "t": value["t"]}
    assert tokenizers_of("demo")[0].escape(value) is value, "without the option nothing changes"


def test_special_tokens_are_escaped_and_other_added_ones_are_not(tmp_path):
    plain = Tokenizer(save(tiny_tokenizers.byte_level_with_added(), tmp_path))
    escaping = Tokenizer(tmp_path, escapes=True)
    ids = escaping.encode(escaping.escape("<think><|im_end|>"))
    assert plain.token_to_id("<think>") in ids and plain.token_to_id("<|im_end|>") not in ids


def test_an_eos_token_counts_as_special_even_if_the_tokenizer_does_not_say_so(tmp_path):
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken("<|end|>", special=False)])
    eos = tokenizer.token_to_id("<|end|>")
    escaping = Tokenizer(save(tokenizer, tmp_path), [eos], escapes=True)
    assert eos not in escaping.encode(escaping.escape("a<|end|>"))
    assert eos in escaping.encode("a<|end|>")


def test_what_a_template_joins_around_an_image_is_no_special_token():
    plain, escaping = tokenizers_of("demo")
    before, after = escaping.escape(f"<|us{image_mark(7)}er|>").split(image_mark(7))
    assert specials_in(plain, escaping.encode(before + after)) == []
    assert escaping.unescape(before + after) == "<|user|>"


@pytest.mark.parametrize("name", LOSSLESS)
@given(data=st.data())
def test_reserved_tokens_are_escaped_without_the_option_and_no_others_are(name, data):
    plain = tokenizers_of(name)[0]
    reserved = min(plain.special_ids)
    tokenizer = reserving(name, reserved)
    text = data.draw(texts(name))
    ids = tokenizer.encode(tokenizer.escape(text), add_special_tokens=False)
    expected = [i for i in specials_in(plain, plain.encode(text, add_special_tokens=False)) if i != reserved]
    assert specials_in(plain, ids) == expected
    assert tokenizer.encode(text) == plain.encode(text), "the chat template may write them"


@functools.cache
def reserving(name: str, token_id: int) -> Tokenizer:
    folder = DEMO_MODEL if name == "demo" else save(tiny_tokenizers.KINDS[name](), Path(tempfile.mkdtemp()))
    return Tokenizer(folder, reserved=[token_id])


def test_a_reserved_token_that_is_not_flagged_as_special_is_escaped_too(tmp_path):
    raw = tiny_tokenizers.byte_level()
    raw.add_tokens(["<image>"])
    image = raw.token_to_id("<image>")
    tokenizer = Tokenizer(save(raw, tmp_path), reserved=[image])
    assert image not in tokenizer.encode(tokenizer.escape("a<image>"))
    assert tokenizer.encode("a<image><image>").count(image) == 2
    assert tokenizer.unescape(tokenizer.escape("a<image>")) == "a<image>"


def test_a_long_text_is_escaped_in_the_time_that_its_length_takes():
    escaping = tokenizers_of("demo")[1]
    started_at = time.process_time()
    assert len(escaping.escape("<" * 1_000_000)) == 1_000_000
    assert time.process_time() - started_at < 2


BODY = {"messages": [{"role": "user", "content": "a<eos>"}], "max_tokens": 2}


@pytest.mark.parametrize("escapes", [False, True])
def test_routes_read_special_tokens_of_clients_as_text_with_the_option_only(serve, escapes):
    served = serve(escape_special_tokens=escapes)
    (served.folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    served.get_ready()
    typed = [1, 5] if escapes else [1, 1]  # <eos> is one token, or five bytes

    def tokens(route, body):
        answer = served.post(route, body)
        assert answer.status_code == 200, answer.json
        return answer.json

    assert len(tokens("/tokenize", {"inputs": "a<eos>"})) == sum(typed)
    chat = tokens("/chat_tokenize", BODY)
    assert (len(chat["tokenize_response"]), chat["templated_text"]) == (sum(typed) + 1, "a<eos><eos>")
    assert "".join(token["text"] for token in chat["tokenize_response"]) == "a<eos><eos>"
    assert tokens("/v1/chat/completions", BODY)["usage"]["prompt_tokens"] == sum(typed) + 1
    completion = {"prompt": "a<eos>", "max_tokens": 2, "echo": True}
    answer = tokens("/v1/completions", completion)
    assert answer["usage"]["prompt_tokens"] == sum(typed) and answer["choices"][0]["text"].startswith("a<eos>")
    native = tokens("/generate", {"inputs": "a<eos>", "parameters": {"details": True, "decoder_input_details": True}})
    assert len(native["details"]["prefill"]) == sum(typed)


def test_thousands_of_special_tokens_are_escaped_in_seconds(tmp_path):
    """As Gemma has them in GGUF files."""
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_special_tokens([f"<unused{n}>" for n in range(3000)])
    began = time.process_time()
    escaping = Tokenizer(save(tokenizer, tmp_path), escapes=True)
    assert time.process_time() - began < 20
    assert not escaping.special_ids & {*escaping.encode(escaping.escape("a<unused2999>"))}
