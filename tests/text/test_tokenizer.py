"""A model's tokenizer: ids, bytes and texts of single tokens, and what is found out about it at boot."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import tiny_tokenizers
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from image_files import save_preprocessor
from tiny_tokenizers import ALL, ANY_TEXT, REAL_TEXTS, Kind, any_ids, kind_of, save

from run import HERE, ConfigError
from text.tokenizer import Tokenizer, read_facts


@pytest.mark.parametrize("name", ALL)
def test_token_text_is_what_the_token_adds_in_the_middle_of_a_text(name):
    kind = kind_of(name)
    before = kind.ids("the dog")
    told = kind.decode(before)
    for token_id in range(kind.raw.get_vocab_size()):
        if token_id in kind.tokenizer.special_ids:
            expected = kind.raw.id_to_token(token_id)
        else:
            expected = kind.decode([*before, token_id])[len(told) :]
        assert kind.tokenizer.token_text(token_id) == expected


@pytest.mark.parametrize("name", ALL)
@given(string=ANY_TEXT, add_special_tokens=st.booleans())
def test_spans_are_the_librarys_offsets_counted_in_bytes(name, string, add_special_tokens):
    kind = kind_of(name)
    encoding = kind.raw.encode(string, add_special_tokens=add_special_tokens)
    spans = kind.tokenizer.spans(string, add_special_tokens)
    assert [token_id for token_id, _, _ in spans] == encoding.ids
    for (_, start, stop), (first, behind) in zip(spans, encoding.offsets):
        assert len(string[:first].encode()) == start
        assert string.encode()[start:stop].decode() == string[first:behind]


def test_tokens_that_the_tokenizer_adds_itself_span_nothing():
    kind = kind_of("llama")
    (start, *rest) = kind.tokenizer.spans("é 😀dog</s>")
    assert start == (kind.id("<s>"), 0, 0)
    assert rest[-1] == (kind.id("</s>"), 10, 14), "one that is written in the text is where it is written"
    assert kind.tokenizer.spans("é", add_special_tokens=False)[-1][1:] == (0, 2)


@pytest.mark.parametrize("name", ["byte-level", "byte-level-with-added", "demo"])
@given(data=st.data())
def test_bytes_of_byte_level_tokens_add_up_to_the_text(name, data):
    kind = kind_of(name)
    pieces = [(i, kind.tokenizer.piece_bytes(i)) for i in data.draw(any_ids(kind, 10))]
    assert [i for i, piece in pieces if piece is None] == [i for i, _ in pieces if i in kind.tokenizer.special_ids]
    told = b"".join(piece for _, piece in pieces if piece is not None)
    assert told.decode(errors="replace") == kind.decode([i for i, _ in pieces])


def test_bytes_are_told_of_tokens_that_stand_for_one_byte_and_not_where_the_text_around_has_a_say():
    for name in ["llama", "gemma"]:
        kind = kind_of(name)
        told = {kind.raw.id_to_token(i): kind.tokenizer.piece_bytes(i) for i in range(kind.raw.get_vocab_size() + 5)}
        known = {token: piece for token, piece in told.items() if piece is not None}
        assert known == {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    assert {kind_of("metaspace-bpe").tokenizer.piece_bytes(i) for i in range(300)} == {None}


def test_a_token_that_only_looks_like_a_byte_has_no_bytes(tmp_path):
    raw = tiny_tokenizers.gemma()
    raw.add_tokens(["<0xZZ>"])
    assert Tokenizer(save(raw, tmp_path)).piece_bytes(raw.token_to_id("<0xZZ>")) is None
    raw = tiny_tokenizers.metaspace_bpe()  # whose decoder knows no such tokens
    raw.add_tokens(["<0x41>"])
    assert Tokenizer(save(raw, tmp_path)).piece_bytes(raw.token_to_id("<0x41>")) is None


def test_threads_may_share_a_tokenizer():
    interval = sys.getswitchinterval()
    threads, wrong, start = [], [], threading.Barrier(8)

    def work(kind: Kind, strings: list[str], expected: list[tuple[list[int], str]]) -> None:
        start.wait()
        for _ in range(10):
            for string, (ids, whole) in zip(strings, expected):
                got = kind.tokenizer.encode(string)
                if got != ids or kind.tokenizer.decode(got) != whole:
                    wrong.append(string)

    for n in range(8):
        kind = kind_of(["byte-level", "llama"][n % 2])
        strings = [f"{n} {string}" for string in REAL_TEXTS.values()]
        expected = [(ids, kind.decode(ids)) for ids in (kind.raw.encode(string).ids for string in strings)]
        threads.append(threading.Thread(target=work, args=(kind, strings, expected)))
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


@pytest.mark.parametrize(
    ("config", "adds_bos"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "bos_token": "<s>"}, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": {"content": "<s>"}}, True),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False, "bos_token": "<s>"}, False),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "bos_token": None}, False),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "bos_token": "<unheard>"}, False),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True, "bos_token": "<s>"}, False),
    ],
)
def test_a_text_begins_with_bos_where_tokenizer_config_says_so(tmp_path, config, adds_bos):
    """tokenizer.json says nothing of it in DeepSeek's models, of which transformers 4 has a class that does it."""
    folder = save(tiny_tokenizers.byte_level(), tmp_path, **config)
    tokenizer = Tokenizer(folder)
    plain = tokenizer.encode("dog", add_special_tokens=False)
    assert tokenizer.encode("dog") == [tokenizer.token_to_id("<s>")] * adds_bos + plain
    assert [token_id for token_id, *_ in tokenizer.spans("dog")] == tokenizer.encode("dog")


def test_encoding_adds_special_tokens_unless_told_otherwise():
    kind = kind_of("llama")
    assert kind.tokenizer.encode("dog") == [kind.id("<s>"), *kind.ids("dog")]
    assert kind.tokenizer.encode("dog", add_special_tokens=False) == kind.ids("dog")


def test_a_tokenizer_saved_with_truncation_and_padding_does_neither(tmp_path):
    raw = tiny_tokenizers.byte_level()
    raw.enable_truncation(max_length=4)
    raw.enable_padding(length=64)
    tokenizer = Tokenizer(save(raw, tmp_path))
    string = "the dog and the fox"
    assert tokenizer.decode(tokenizer.encode(string)) == string
    assert len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize(
    ("eos", "flagged", "plain", "expected"),
    [
        ("</s>", [], [], ["</s>"]),
        ({"content": "</s>", "lstrip": False}, [], [], ["</s>"]),
        ("<|end|>", [], ["<|end|>"], ["<|end|>"]),  # named, so it counts although it is not flagged as special
        *((nothing, [], [], []) for nothing in (None, "<|nowhere|>", 7, {"content": None}, {}, ["</s>"])),
        ("</s>", ["<|eot_id|>"], [], ["</s>", "<|eot_id|>"]),
        (None, ["<|im_end|>", "<end_of_turn>"], [], ["<|im_end|>", "<end_of_turn>"]),
        ("</s>", [], ["<|eot_id|>", "<|im_end|>"], ["</s>"]),  # text of an answer, as it is not flagged
    ],
)
def test_the_eos_tokens_are_the_one_that_the_files_name_and_ends_of_turns_that_are_special(
    tmp_path, eos, flagged, plain, expected
):
    raw = tiny_tokenizers.byte_level()
    raw.add_special_tokens(flagged)
    raw.add_tokens(plain)
    found = read_facts(save(raw, tmp_path, eos_token=eos), tmp_path)
    assert found["eos_token_ids"] == [raw.token_to_id(name) for name in expected]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"version": "1.0"}', b'{\n"model": {\n}}', b"\xff\xfe"])
def test_a_corrupt_tokenizer_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read as a tokenizer: ") as refused:
        read_facts(tmp_path, tmp_path)
    assert len(str(refused.value).splitlines()) == 1


def test_a_tokenizer_config_that_is_no_json_is_refused(tmp_path):
    folder = save(tiny_tokenizers.byte_level(), tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read as JSON"):
        read_facts(folder, tmp_path)


def test_a_tokenizer_that_turns_text_into_nothing_is_refused(tmp_path):
    folder = save(tokenizers.Tokenizer(tokenizers.models.BPE()), tmp_path)
    with pytest.raises(ConfigError, match="turns text into nothing"):
        read_facts(folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "token_id", "kwargs", "why"),
    [
        ("pixtral", 4, '{"size": 512}', None),
        ("pixtral", 4, '{"max_patches": 4}', r"max_patches; the fields that this model supports: size$"),
        ("pixtral", 5, "{}", r"the image token \[IMG\] is 5 in config\.json and 4 in tokenizer\.json$"),
        ("internvl", 4, "{}", r"the image token <IMG_CONTEXT> is 4 in config\.json and None in tokenizer\.json$"),
        (None, 4, "{}", None),
        (None, 4, '{"size": 512}', r"^--mm-processor-kwargs \(MM_PROCESSOR_KWARGS\): this model reads no images"),
    ],
)
def test_what_says_how_images_are_read_must_fit_the_model(tmp_path, name, token_id, kwargs, why):
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3, "[IMG]": 4}, "[UNK]"))
    save(raw, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if name:
        save_preprocessor(name, tmp_path, image_token_id=token_id)
    if why is None:
        read_facts(tmp_path, tmp_path, None, kwargs)
        return
    with pytest.raises(ConfigError, match=why):
        read_facts(tmp_path, tmp_path, None, kwargs)


def test_as_a_process_it_prints_what_the_worker_must_know(tmp_path):
    folder = save(tiny_tokenizers.byte_level(), tmp_path, eos_token="</s>")
    done = subprocess.run([sys.executable, "-m", "text.tokenizer", folder, tmp_path], capture_output=True, text=True, cwd=HERE)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["eos_token_ids"] == [2]


def test_as_a_process_it_says_in_one_line_what_is_wrong(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "text.tokenizer", tmp_path, tmp_path], capture_output=True, text=True, cwd=HERE
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{tmp_path / 'tokenizer.json'} cannot be read as a tokenizer")
