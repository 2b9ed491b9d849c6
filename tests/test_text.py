"""Text as it streams is the text as a whole, whatever the tokenizer: nothing lost, nothing doubled, nothing half a character.

Each promise is held for every kind of tokenizer in `tiny_tokenizers` and for the demonstration model's own. The reference is
always the library's decoding of all ids at once; for chats it is transformers' `apply_chat_template`.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jinja2
import pytest
import tiny_tokenizers
import tokenizers
from fakes.tokenizer import byte_tokenizer
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import save

import text
from chat import ChatTemplate, TemplateError
from config import DEMO_MODEL, HERE, ConfigError
from text import Piece, TextStream, Tokenizer, check, detokenizer_for, find_stop, stop_begun

# Most of these run with each of eleven tokenizers.
thorough = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
brief = settings(thorough, max_examples=25)

# What texts are made of here: one, two, three and four bytes, several characters that are one to the eye, words and spaces.
PARTS = [" ", "  ", "\n", "\t", ".", "a", "b", "dog", " the"]
PARTS += ["é", "e\u0301", "ß", "ع", "€", "日", "語", "二", "𠀀", "😀", "👨‍👩‍👧", "🏳️‍🌈"]
ANY_TEXT = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)

REAL_TEXTS = {
    "emoji": "Great! 😀 and 👨‍👩‍👧‍👦, 🏳️‍🌈🇫🇷👍🏽!",
    "cjk": "日本語の文章です。한국어, 漢字㐀𠀀𠀀",
    "combining marks": "e\u0301 n\u0303 a\u0308\u0323 हिन्दी ภาษาไทย",
    "mixed scripts": "naïve Здравствуй, мир — العربية, שלום; x²≤√π",
    "spaces": "  two leading,   three inside, and trailing  ",
    "newlines": "line\n\n\tindented\r\n  end\n",
}
# These lose nothing: what is encoded comes back as it was.
LOSSLESS = ["byte-level", "byte-level-with-added", "byte-level-in-sequence", "llama", "gemma", "demo"]
# With a decoder behind the byte-level one that holds for text, which real answers are; not for bytes that make none.
EXACT = [kind for kind in [*tiny_tokenizers.KINDS, "demo"] if kind != "byte-level-in-sequence"]


@dataclass(frozen=True, eq=False)
class Kind:
    """A tokenizer as the library knows it, and as the server does."""

    raw: tokenizers.Tokenizer
    tokenizer: Tokenizer
    folder: Path

    def ids(self, string: str) -> list[int]:
        return self.raw.encode(string, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.raw.decode(ids, skip_special_tokens=True)

    def id(self, token: str) -> int:
        token_id = self.raw.token_to_id(token)
        assert token_id is not None
        return token_id

    def added_text(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """What `ids` add to the text of `prompt`."""
        told, whole = self.decode(prompt), self.decode([*prompt, *ids])
        assert whole.startswith(told)
        return whole[len(told) :]


@pytest.fixture(scope="session")
def kinds(tmp_path_factory):
    """Makes each kind once, when a test asks for it."""
    made: dict[str, Kind] = {}

    def kind(name: str) -> Kind:
        if name not in made:
            folder = DEMO_MODEL
            if name != "demo":
                folder = save(tiny_tokenizers.KINDS[name](), tmp_path_factory.mktemp(name))
            raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            made[name] = Kind(raw, Tokenizer(folder), folder)
        return made[name]

    return kind


@functools.cache
def any_ids(kind: Kind, max_chunks: int):
    """Ids of all sorts: any at all, also some that no token has; added and special ones; runs that make characters."""
    chunks = [[i] for i in range(kind.raw.get_vocab_size() + 5)]
    telling = [kind.ids(part) for part in PARTS] + [[i] for i in kind.raw.get_added_tokens_decoder()]
    chunks += telling * (len(chunks) // len(telling) + 1)  # about half of what is drawn
    numbers = st.lists(st.integers(0, len(chunks) - 1), max_size=max_chunks)
    return numbers.map(lambda drawn: [i for number in drawn for i in chunks[number]])


def stream_text(kind: Kind, prompt: Sequence[int], ids: Sequence[int]) -> str:
    detokenizer = detokenizer_for(kind.tokenizer, prompt)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


def run(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], stops: Sequence[str] = (), **options):
    """Streams `ids` as a request does; the last of them ends it, and so does a stop string."""
    stream, pieces = TextStream(tokenizer, prompt, stops, **options), []
    for n, token_id in enumerate(ids):
        pieces += stream.push(token_id, -0.5, [], last=n == len(ids) - 1)
        if stream.stopped:
            break
    return stream, pieces


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if not piece.special)


def ends_inside_a_character(kind: Kind, prompt: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether `ids` may change how the end of `prompt` reads, so that its text is not the beginning of the whole text.

    Bytes that make no character are told as U+FFFD; with byte fallback this goes for a whole run of them.
    """
    told = kind.decode(prompt)
    if told.endswith("\ufffd"):
        return True
    tokens = [kind.raw.id_to_token(i) or "" for i in prompt if i not in kind.tokenizer.special_ids]
    ends_in_a_byte = next(filter(None, reversed(tokens)), "").startswith("<0x")
    return ends_in_a_byte and not kind.decode([*prompt, *ids]).startswith(told)


# Streaming


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
@thorough
def test_a_stream_is_exactly_what_decoding_everything_adds_to_the_prompt(kinds, name, data):
    kind = kinds(name)
    prompt, ids = data.draw(any_ids(kind, 5)), data.draw(any_ids(kind, 10))
    assume(not ends_inside_a_character(kind, prompt, ids))
    whole = kind.added_text(prompt, ids)
    assert stream_text(kind, prompt, ids) == whole
    stream, pieces = run(kind.tokenizer, prompt, ids)
    assert stream.text == text_of(pieces) == whole
    assert [piece.id for piece in pieces] == ids
    assert stream.tokens == len(ids)


@pytest.mark.parametrize("name", LOSSLESS)
@given(data=st.data())
@brief
def test_a_character_that_the_prompt_began_comes_out_whole_and_nothing_of_the_prompt_is_repeated(kinds, name, data):
    kind = kinds(name)
    ids = kind.ids(data.draw(ANY_TEXT))
    cut = data.draw(st.integers(0, len(ids)))
    prompt, rest = ids[:cut], ids[cut:]
    whole = kind.decode(ids)
    # The whole characters of the prompt: its text without the up to three bytes that begin one more.
    heads = [kind.decode(prompt[: max(0, cut - n)]).rstrip("\ufffd") for n in range(4)]
    head = max((head for head in heads if whole.startswith(head)), key=len)
    if rest or head == whole:
        assert head + stream_text(kind, prompt, rest) == whole
        assert head + text_of(run(kind.tokenizer, prompt, rest)[1]) == (whole if rest else head)


@pytest.mark.parametrize("name", LOSSLESS)
def test_an_answer_without_text_has_none_even_if_the_prompt_ends_inside_a_character(kinds, name):
    kind = kinds(name)
    prompt = kind.ids("dog 😀")[:-1]
    assert kind.decode(prompt).endswith("\ufffd")
    special = next(i for i in sorted(kind.tokenizer.special_ids))
    stream, (piece,) = run(kind.tokenizer, prompt, [special])
    assert (stream.text, piece.text, piece.special) == ("", kind.raw.id_to_token(special), True)


@pytest.mark.parametrize("string", REAL_TEXTS.values(), ids=REAL_TEXTS)
@pytest.mark.parametrize("name", [*tiny_tokenizers.KINDS, "demo"])
def test_real_text_streams_as_it_is(kinds, name, string):
    kind = kinds(name)
    prompt, ids = kind.ids("The dog"), kind.ids(string)
    stream, pieces = run(kind.tokenizer, prompt, ids)
    whole = kind.added_text(prompt, ids)
    assert text_of(pieces) == stream.text == whole
    assert "\ufffd" not in whole
    assert not any("\ufffd" in piece.text for piece in pieces)


@pytest.mark.parametrize("string", REAL_TEXTS.values(), ids=REAL_TEXTS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_real_text_comes_back_whole_when_it_is_all_of_the_answer(kinds, name, string):
    kind = kinds(name)
    if name == "byte-level-in-sequence":  # it takes off one space that begins a text
        string = " " + string
    stream, pieces = run(kind.tokenizer, [], kind.ids(string))
    assert text_of(pieces) == stream.text == string.removeprefix(" " if name == "byte-level-in-sequence" else "")


@pytest.mark.parametrize("name", ["llama", "metaspace-bpe", "metaspace-unigram"])
def test_a_space_that_begins_an_answer_is_kept_behind_a_prompt(kinds, name):
    kind = kinds(name)
    prompt, answer = kind.ids("The quick"), kind.ids("dog")
    assert kind.raw.id_to_token(answer[0]).startswith("▁")
    assert run(kind.tokenizer, prompt, answer)[0].text == " dog"


@pytest.mark.parametrize("name", ["llama", "metaspace-bpe", "metaspace-unigram"])
def test_a_space_that_begins_the_whole_text_is_taken_off(kinds, name):
    kind = kinds(name)
    start = [kind.id("<s>")]
    assert run(kind.tokenizer, start, kind.ids("dog"))[0].text == "dog"
    assert run(kind.tokenizer, [], kind.ids("dog"))[0].text == "dog"


def test_several_spaces_begin_an_answer_as_they_are(kinds):
    kind = kinds("llama")
    spaces = [kind.id("▁▁▁▁"), kind.id("▁")]
    assert run(kind.tokenizer, kind.ids("The dog"), [*spaces, *kind.ids("a")])[0].text == " " * 6 + "a"


def test_tokens_inside_a_character_are_empty_and_the_one_that_completes_it_carries_it(kinds):
    kind = kinds("byte-level")
    ids = kind.ids("😀")
    assert len(ids) == 4
    stream = TextStream(kind.tokenizer, kind.ids("dog"))
    released = [[piece.text for piece in stream.push(i, -0.5, [])] for i in ids]
    assert released == [[], [""], [""], ["", "😀"]], "only the last piece waits"
    assert stream.text == "😀", "nothing is held back once the character is complete"


def test_bytes_that_may_still_change_come_with_the_token_behind_them(kinds):
    kind = kinds("llama")
    ids = [kind.id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    stream = TextStream(kind.tokenizer, kind.ids("dog"))
    released = [[piece.text for piece in stream.push(i, -0.5, [])] for i in [*ids, kind.id("f")]]
    assert released == [[], [""], [""], [""], ["", "😀f"]], "only the last piece waits"
    assert [piece.text for piece in run(kind.tokenizer, kind.ids("dog"), ids)[1]] == ["", "", "", "😀"]


def test_bytes_that_are_no_character_are_told_as_the_library_tells_them(kinds):
    kind = kinds("llama")
    ids = [kind.id("<0xE2>"), kind.id("<0x82>"), kind.id("f"), kind.id("<0xFF>")]
    assert run(kind.tokenizer, [], ids)[0].text == kind.decode(ids) == "\ufffd\ufffdf\ufffd"


@pytest.mark.parametrize("name", ["llama", "gemma", "byte-level", "demo"])
def test_an_answer_that_ends_with_an_emoji_delivers_it(kinds, name):
    kind = kinds(name)
    end = min(kind.tokenizer.special_ids)
    stream, pieces = run(kind.tokenizer, kind.ids("Say it"), [*kind.ids("Bye 😀"), end])
    assert stream.text.endswith("Bye 😀")
    assert text_of(pieces) == stream.text
    assert (pieces[-1].special, pieces[-1].text) == (True, kind.raw.id_to_token(end))


@pytest.mark.parametrize("name", [*tiny_tokenizers.KINDS, "demo"])
def test_special_tokens_show_their_name_are_marked_and_are_not_in_the_text(kinds, name):
    kind = kinds(name)
    flagged = {i: token.content for i, token in kind.raw.get_added_tokens_decoder().items() if token.special}
    assert flagged
    assert kind.tokenizer.special_ids == set(flagged)
    word = kind.ids("dog")
    for special, its_name in flagged.items():
        stream, pieces = run(kind.tokenizer, kind.ids("The"), [special, *word, special, *word])
        shown = [(piece.id, piece.text) for piece in pieces if piece.special]
        assert shown == [(special, its_name)] * 2
        assert stream.text == kind.added_text(kind.ids("The"), word + word)
        assert kind.tokenizer.decode([special, *word]) == kind.decode(word)


def test_eos_ids_of_the_model_are_special_even_where_the_tokenizer_does_not_say_so(kinds):
    kind = kinds("gemma")
    end = kind.id("<unused0>")
    assert "<unused0>" in kind.decode([end])
    tokenizer = Tokenizer(kind.folder, [end])
    stream, pieces = run(tokenizer, kind.ids("The"), [*kind.ids(" dog"), end])
    assert stream.text == " dog"
    assert (pieces[-1].text, pieces[-1].special) == ("<unused0>", True)
    assert tokenizer.decode([*kind.ids("dog"), end]) == "dog"
    assert tokenizer.token_text(end) == "<unused0>"


@pytest.mark.parametrize("name", [*tiny_tokenizers.KINDS, "demo"])
def test_an_id_without_a_token_has_no_text_and_harms_none(kinds, name):
    kind = kinds(name)
    beyond = kind.raw.get_vocab_size() + 100
    prompt, word = kind.ids("The"), kind.ids("dog")
    stream, pieces = run(kind.tokenizer, [*prompt, beyond], [beyond, *word, beyond])
    assert stream.text == kind.added_text(prompt, word)
    assert [piece.special for piece in pieces] == [False] * len(pieces)
    assert kind.tokenizer.token_text(beyond) == ""


def test_a_special_token_inside_a_character_does_not_break_it(kinds):
    for name in ["byte-level", "llama"]:
        kind = kinds(name)
        first, *rest = kind.ids("😀")[-4:]
        assert run(kind.tokenizer, kind.ids("The"), [first, kind.id("</s>"), *rest])[0].text == "😀"


def test_what_is_told_of_a_token_travels_with_its_piece(kinds):
    kind = kinds("byte-level")
    stream = TextStream(kind.tokenizer, [])
    (piece,) = stream.push(kind.id("a"), -1.25, [(5, -0.5), (6, -2.0)], last=True)
    assert piece == Piece(kind.id("a"), "a", -1.25, False, [(5, -0.5), (6, -2.0)])


@pytest.mark.parametrize("name", [*tiny_tokenizers.KINDS, "demo"])
def test_token_text_is_what_the_token_adds_in_the_middle_of_a_text(kinds, name):
    kind = kinds(name)
    before = kind.ids("the dog")
    told = kind.decode(before)
    for token_id in range(kind.raw.get_vocab_size()):
        if token_id in kind.tokenizer.special_ids:
            expected = kind.raw.id_to_token(token_id)
        else:
            expected = kind.decode([*before, token_id])[len(told) :]
        assert kind.tokenizer.token_text(token_id) == expected


# Tokens and the bytes and texts they stand for


@pytest.mark.parametrize("name", [*tiny_tokenizers.KINDS, "demo"])
@given(string=ANY_TEXT, add_special_tokens=st.booleans())
@brief
def test_spans_are_the_librarys_offsets_counted_in_bytes(kinds, name, string, add_special_tokens):
    kind = kinds(name)
    encoding = kind.raw.encode(string, add_special_tokens=add_special_tokens)
    spans = kind.tokenizer.spans(string, add_special_tokens)
    assert [token_id for token_id, _, _ in spans] == encoding.ids
    for (_, start, stop), (first, behind) in zip(spans, encoding.offsets):
        assert len(string[:first].encode()) == start
        assert string.encode()[start:stop].decode() == string[first:behind]


def test_tokens_that_the_tokenizer_adds_itself_span_nothing(kinds):
    kind = kinds("llama")
    (start, *rest) = kind.tokenizer.spans("é 😀dog</s>")
    assert start == (kind.id("<s>"), 0, 0)
    assert rest[-1] == (kind.id("</s>"), 10, 14), "one that is written in the text is where it is written"
    assert kind.tokenizer.spans("é", add_special_tokens=False)[-1][1:] == (0, 2)


@pytest.mark.parametrize("name", ["byte-level", "byte-level-with-added", "demo"])
@given(data=st.data())
@brief
def test_bytes_of_byte_level_tokens_add_up_to_the_text(kinds, name, data):
    kind = kinds(name)
    pieces = [(i, kind.tokenizer.piece_bytes(i)) for i in data.draw(any_ids(kind, 10))]
    assert [i for i, piece in pieces if piece is None] == [i for i, _ in pieces if i in kind.tokenizer.special_ids]
    told = b"".join(piece for _, piece in pieces if piece is not None)
    assert told.decode(errors="replace") == kind.decode([i for i, _ in pieces])


def test_bytes_are_told_of_tokens_that_stand_for_one_byte_and_not_where_the_text_around_has_a_say(kinds):
    for name in ["llama", "gemma"]:
        kind = kinds(name)
        told = {kind.raw.id_to_token(i): kind.tokenizer.piece_bytes(i) for i in range(kind.raw.get_vocab_size() + 5)}
        known = {token: piece for token, piece in told.items() if piece is not None}
        assert known == {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    assert {kinds("metaspace-bpe").tokenizer.piece_bytes(i) for i in range(300)} == {None}


def test_a_token_that_only_looks_like_a_byte_has_no_bytes(tmp_path):
    raw = tiny_tokenizers.gemma()
    raw.add_tokens(["<0xZZ>"])
    assert Tokenizer(save(raw, tmp_path)).piece_bytes(raw.token_to_id("<0xZZ>")) is None
    raw = tiny_tokenizers.metaspace_bpe()  # whose decoder knows no such tokens
    raw.add_tokens(["<0x41>"])
    assert Tokenizer(save(raw, tmp_path)).piece_bytes(raw.token_to_id("<0x41>")) is None


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
@brief
def test_the_texts_of_a_prompts_tokens_add_up_to_it_and_special_ones_give_their_name(kinds, name, data):
    kind = kinds(name)
    ids = data.draw(any_ids(kind, 10))
    texts = list(zip(ids, kind.tokenizer.prompt_texts(ids), strict=True))
    assert "".join(told for i, told in texts if i not in kind.tokenizer.special_ids) == kind.tokenizer.decode(ids)
    assert all(told == kind.raw.id_to_token(i) for i, told in texts if i in kind.tokenizer.special_ids)


def test_in_a_prompts_texts_a_character_is_with_the_token_that_completes_it(kinds):
    kind = kinds("byte-level")
    assert kind.tokenizer.prompt_texts([kind.id("</s>"), *kind.ids("😀a")]) == ["</s>", "", "", "", "😀", "a"]


# Stop strings


def test_a_stop_string_is_found_across_tokens(kinds):
    kind = kinds("byte-level")
    ids = [kind.id(character) for character in "xSTOPy"]
    stream, pieces = run(kind.tokenizer, [], ids, ["STOP"])
    assert stream.stopped
    assert text_of(pieces) == stream.text == "xSTOP"
    assert len(pieces) == stream.tokens == 5


def test_text_ends_exactly_behind_a_stop_string_inside_a_token(kinds):
    kind = kinds("byte-level-with-added")
    stream, (piece,) = run(kind.tokenizer, [], [kind.id("new line"), kind.id("a")], ["w l"])
    assert stream.stopped
    assert piece.text == stream.text == "new l"


@pytest.mark.parametrize("stops", [["dog and", "dog"], ["dog", "dog and"]])
def test_the_stop_string_that_is_complete_first_ends_the_text(kinds, stops):
    kind = kinds("byte-level")
    assert run(kind.tokenizer, [], kind.ids("a dog and b"), stops)[0].text == "a dog"


def test_of_two_stop_strings_in_one_token_the_one_that_ends_first_counts(kinds):
    kind = kinds("byte-level-with-added")
    for stops in (["ew line", "w l"], ["w l", "ew line"]):
        assert run(kind.tokenizer, [], [kind.id("new line")], stops)[0].text == "new l"


def test_a_stop_string_that_repeats_its_own_beginning_is_found(kinds):
    kind = kinds("byte-level")
    for string, stop in [("aaab", "aab"), ("ababac", "abac"), ("\n\n\nA", "\n\nA")]:
        ids = [kind.ids(character)[0] for character in string] + kind.ids("z")
        stream, _ = run(kind.tokenizer, [], ids, [stop])
        assert (stream.text, stream.stopped) == (string, True)


@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma", "demo"])
def test_a_stop_string_may_be_of_any_script(kinds, name):
    kind = kinds(name)
    for stop in ["語", "😀", "👨‍👩‍👧", "e\u0301"]:
        stream, pieces = run(kind.tokenizer, kind.ids("The dog"), kind.ids(f"a{stop}b"), [stop])
        assert stream.stopped
        assert text_of(pieces) == stream.text == kind.added_text(kind.ids("The dog"), kind.ids(f"a{stop}"))


def test_a_stop_string_in_text_that_was_held_to_the_end_is_found(kinds):
    kind = kinds("llama")
    stream, pieces = run(kind.tokenizer, kind.ids("The"), kind.ids("x😀😀"), ["😀"])
    assert stream.stopped
    assert text_of(pieces) == stream.text == " x😀"
    assert len(pieces) == stream.tokens


def test_the_prompt_is_not_searched_for_stop_strings(kinds):
    kind = kinds("byte-level")
    stream, _ = run(kind.tokenizer, kind.ids("the dog do"), [kind.id("g"), kind.id("a")], ["dog", "do"])
    assert (stream.text, stream.stopped) == ("ga", False)


def test_an_empty_stop_string_and_the_name_of_a_special_token_stop_nothing(kinds):
    kind = kinds("byte-level")
    stream, _ = run(kind.tokenizer, [], [*kind.ids("the dog"), kind.id("</s>"), kind.id("a")], ["", "</s>"])
    assert (stream.text, stream.stopped) == ("the doga", False)


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
@brief
def test_wherever_tokens_border_the_text_ends_behind_the_first_stop_string(kinds, name, data):
    kind = kinds(name)
    prompt, ids = kind.ids("The dog"), data.draw(any_ids(kind, 12))
    whole = kind.added_text(prompt, ids)
    cuts = st.tuples(st.integers(0, len(whole)), st.integers(1, 6)).map(lambda cut: whole[cut[0] : cut[0] + cut[1]])
    stops = data.draw(st.lists(st.one_of(cuts, ANY_TEXT), max_size=3))
    real = [stop for stop in stops if stop]
    end = next((n for n in range(len(whole) + 1) if any(whole[:n].endswith(stop) for stop in real)), None)
    stream, pieces = run(kind.tokenizer, prompt, ids, stops)
    assert stream.text == text_of(pieces) == whole[:end]
    assert stream.stopped == (end is not None)
    assert [piece.id for piece in pieces] == ids[: stream.tokens]


@given(string=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), data=st.data())
@thorough
def test_find_stop_finds_the_end_of_the_first_complete_stop_string(string, stops, data):
    ends = [n for n in range(len(string) + 1) if any(string[:n].endswith(stop) for stop in stops)]
    scanned = data.draw(st.integers(0, ends[0] - 1 if ends else len(string)), label="scanned")
    assert find_stop(string, stops, scanned) == (ends[0] if ends else None)


@given(string=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@thorough
def test_stop_begun_is_the_longest_end_that_may_become_a_stop_string(string, stops):
    ends = [string[n:] for n in range(len(string) + 1)]
    assert stop_begun(string, stops) == next(
        end for end in ends if end == "" or any(stop.startswith(end) and stop != end for stop in stops)
    )


def began(string: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `string` may become a stop string, the plain way."""
    return max((n for stop in stops for n in range(len(stop)) if string.endswith(stop[:n])), default=0)


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
@thorough
def test_without_keep_stop_nothing_of_a_stop_string_is_ever_shown_and_nothing_else_is_missing(kinds, name, data):
    kind = kinds(name)
    prompt, ids = kind.ids("The dog"), data.draw(any_ids(kind, 12))
    whole = kind.added_text(prompt, ids)
    cuts = st.tuples(st.integers(0, len(whole)), st.integers(1, 6)).map(lambda cut: whole[cut[0] : cut[0] + cut[1]])
    near_misses = st.tuples(cuts, ANY_TEXT).map("".join)
    stops = data.draw(st.lists(st.one_of(cuts, near_misses, ANY_TEXT), max_size=4), label="stops")
    real = [stop for stop in stops if stop]
    min_tokens = data.draw(st.integers(0, len(ids) + 1), label="min_tokens")
    keep_stop = data.draw(st.booleans(), label="keep_stop")

    detokenizer = detokenizer_for(kind.tokenizer, prompt)
    arrived = [detokenizer.push(i) for i in ids]  # by token
    before = len("".join(arrived[: max(0, min_tokens - 1)]))
    ends = range(before + 1, len(whole) + 1) if min_tokens <= len(ids) else range(0)
    end = next((n for n in ends if any(whole[:n].endswith(stop) for stop in real)), None)
    final = whole[:end]
    if end is not None and not keep_stop:
        final = final[: end - max(len(stop) for stop in real if final.endswith(stop))]

    stream, pieces = TextStream(kind.tokenizer, prompt, stops, keep_stop, min_tokens), []
    for n, token_id in enumerate(ids):
        pieces += stream.push(token_id, -0.5, [], last=n == len(ids) - 1)
        if stream.stopped:
            break
        assert stream.text.startswith(text_of(pieces))
        if n < len(ids) - 1:
            certain = "".join(arrived[: n + 1])
            assert stream.text == certain[: len(certain) - (0 if keep_stop else began(certain, real))]
            assert final.startswith(stream.text)
    assert stream.text == text_of(pieces) == final
    assert stream.stopped == (end is not None)
    assert [piece.id for piece in pieces] == ids[: stream.tokens]
    names = [piece.text for piece in pieces if piece.special]
    assert names == [kind.raw.id_to_token(i) for i in ids[: stream.tokens] if i in kind.tokenizer.special_ids]


def released(kind: Kind, tokens: Sequence[str], stops: Sequence[str], **options) -> list[list[str]]:
    """The pieces' texts that each of `tokens` sets free, the last one ending the answer."""
    stream, ids = TextStream(kind.tokenizer, [], stops, keep_stop=False, **options), [kind.id(token) for token in tokens]
    return [[piece.text for piece in stream.push(i, -0.5, [], last=n == len(ids) - 1)] for n, i in enumerate(ids)]


def test_without_keep_stop_pieces_wait_while_they_may_become_a_stop_string(kinds):
    kind = kinds("byte-level")
    assert released(kind, "xSTyz", ["STOP"]) == [["x"], [], [], ["S", "T", "y"], ["z"]]
    assert released(kind, "SSTOz", ["STOP"]) == [[], ["S"], [], [], ["S", "T", "O", "z"]], "only as many as must"
    assert released(kind, "xST", ["STOP"]) == [["x"], [], ["S", "T"]], "the last token sets them free"
    assert released(kind, "xSTOP", ["STOP"]) == [["x"], [], [], [], ["", "", "", ""]]


def test_without_keep_stop_a_piece_in_which_a_stop_string_begins_is_cut_there(kinds):
    kind = kinds("byte-level-with-added")
    assert released(kind, ["new line", "a"], ["linea"]) == [[], ["new ", ""]]
    assert released(kind, ["new line", "b"], ["linea"]) == [[], ["new line", "b"]]


def test_without_keep_stop_a_special_token_among_held_pieces_keeps_its_place_and_its_name(kinds):
    kind = kinds("byte-level")
    assert released(kind, ["S", "</s>", "T", "x"], ["ST"]) == [[], [], ["", "</s>", ""], ["x"]]
    assert released(kind, ["S", "</s>", "x"], ["ST"]) == [[], [], ["S", "</s>", "x"]]
    assert released(kind, ["</s>", "x", "</s>", "y"], ["ST"]) == [["</s>"], ["x"], ["</s>"], ["y"]]


def test_without_keep_stop_the_longest_of_those_complete_at_once_is_left_out(kinds):
    kind = kinds("byte-level")
    for stops in (["OP", "STOP", "P"], ["STOP", "P", "OP"]):
        assert run(kind.tokenizer, [], [kind.id(c) for c in "xSTOPy"], stops, keep_stop=False)[0].text == "x"


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, "ab"), (2, "ab"), (3, "abab"), (4, "abab"), (5, "ababx"), (6, "ababx"), (99, "ababx")]
)
def test_a_stop_string_counts_if_it_ends_with_the_token_min_tokens_or_later(kinds, min_tokens, expected):
    kind = kinds("byte-level")
    ids = [kind.id(character) for character in "ababx"]
    stream, _ = run(kind.tokenizer, [], ids, ["ab"], min_tokens=min_tokens)
    assert (stream.text, stream.stopped) == (expected, expected != "ababx")


def test_a_stop_string_may_begin_before_the_token_min_tokens(kinds):
    kind = kinds("byte-level")
    ids = [kind.id(character) for character in "xSTOPy"]
    stream, pieces = run(kind.tokenizer, [], ids, ["STOP"], keep_stop=False, min_tokens=5)
    assert (stream.text, text_of(pieces), stream.tokens) == ("x", "x", 5)


# What it costs


class CountingTokenizer(Tokenizer):
    """Writes down how many ids each decoding was given."""

    def __init__(self, folder: Path):
        self.decoded: list[int] = []
        super().__init__(folder)

    def decode(self, ids):
        self.decoded.append(len(ids))
        return super().decode(ids)


@pytest.mark.parametrize("name", [*tiny_tokenizers.KINDS, "demo"])
def test_a_token_costs_the_same_late_as_early(kinds, name, monkeypatch):
    kind = kinds(name)
    tokenizer = CountingTokenizer(kind.folder)
    searched = []
    monkeypatch.setattr(text, "find_stop", lambda *args: searched.append(len(args[0])) or find_stop(*args))
    sentence = kind.ids("The dog reads 日本語 😀 and the café minds.\n")
    prompt, ids = sentence * 100, sentence * 100
    tokenizer.decoded = []
    for stops in (["never", "at all"], ["#"]):
        assert run(tokenizer, prompt, ids, stops)[0].text == kind.added_text(prompt, ids)
    assert max(tokenizer.decoded, default=0) <= 40
    assert len(tokenizer.decoded) <= 2 * (2 * len(ids) + 10)
    assert max(searched) <= 60
    assert bool(tokenizer.decoded) == (not tokenizer.is_byte_level), "the count counts"


def test_a_token_costs_the_same_late_as_early_without_keep_stop(kinds, monkeypatch):
    kind = kinds("byte-level")
    searched = []
    monkeypatch.setattr(text, "find_stop", lambda *args: searched.append(len(args[0])) or find_stop(*args))
    monkeypatch.setattr(text, "stop_begun", lambda *args: searched.append(len(args[0])) or stop_begun(*args))
    sentence = "The dog reads 日本語 😀 and the café minds.\n"
    stream, _ = run(kind.tokenizer, [], kind.ids(sentence) * 100, ["minds. Not", "\n\n"], keep_stop=False)
    assert stream.text == sentence * 100
    assert 0 < max(searched) <= 30


def test_a_long_run_of_bytes_costs_no_more_than_its_length(kinds):
    kind = kinds("llama")
    tokenizer = CountingTokenizer(kind.folder)
    ids = kind.ids("😀" * 500 + "a")
    tokenizer.decoded = []
    assert run(tokenizer, [], ids)[0].text == "😀" * 500 + "a"
    assert sum(tokenizer.decoded) <= 3 * len(ids)


def test_threads_may_share_a_tokenizer(kinds):
    interval = sys.getswitchinterval()
    threads, wrong, start = [], [], threading.Barrier(8)

    def work(kind: Kind, strings: list[str], expected: list[tuple[list[int], str]]) -> None:
        start.wait()
        for _ in range(10):
            for string, (ids, whole) in zip(strings, expected):
                got = kind.tokenizer.encode(string)
                if got != ids or kind.tokenizer.decode(got) != whole or run(kind.tokenizer, [], got)[0].text != whole:
                    wrong.append(string)

    for n in range(8):
        kind = kinds(["byte-level", "llama"][n % 2])
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


# Chats

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
@brief
def test_an_answer_that_is_continued_ends_right_behind_what_it_says(template, content, asked):
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": content}]
    chat = ChatTemplate(template, SPECIAL_TOKENS)
    text = chat.render(messages)
    assert text.endswith(content.strip())
    assert messages[-1]["content"] == content, "the caller's messages stay as they are"
    if template != TEMPLATES["for training"]:  # which has no generation prompt
        assert text.startswith(chat.render(messages[:-1]).rstrip())


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("content", ["", " \n"])
def test_an_answer_that_says_nothing_yet_is_begun(template, content):
    chat = ChatTemplate(template, SPECIAL_TOKENS)
    assert chat.render([USER, {"role": "assistant", "content": content}]) == chat.render([USER])


def test_the_demo_model_is_asked_for_an_answer_and_continues_one():
    chat = ChatTemplate.load(DEMO_MODEL)
    assert chat.render([{"role": "user", "content": "Hi"}]) == "<|user|>Hi<|assistant|>"
    answer = {"role": "assistant", "content": "Hello "}
    assert chat.render([{"role": "user", "content": "Hi"}, answer]) == "<|user|>Hi<|assistant|>Hello"


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_the_demo_model_reads_a_chat_without_tools_as_its_messages_alone(messages):
    is_continued = messages[-1]["role"] == "assistant"
    ends = ["<|endoftext|>" if m["role"] == "assistant" else "" for m in messages[:-1]] + [
        "" if is_continued else "<|assistant|>"
    ]
    expected = "".join(f"<|{m['role']}|>{m['content']}{end}" for m, end in zip(messages, ends, strict=True))
    assert ChatTemplate.load(DEMO_MODEL).render(messages) == expected


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


def test_an_answer_that_is_printed_twice_is_continued_at_the_second_place():
    chat = ChatTemplate("{{ messages[-1].content }} {{ add_generation_prompt }} {{ messages[-1].content }}!", {})
    assert chat.render([USER, {"role": "assistant", "content": "No"}]) == "No False No"


def test_an_answer_that_the_template_does_not_print_cannot_be_continued():
    chat = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(TemplateError, match="does not print the last message of the assistant, so it cannot be continued"):
        chat.render([USER, {"role": "assistant", "content": "No"}])


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


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}",
        "{% for a in messages %}{% for b in messages %}{% set c = b['content'] %}{% endfor %}{% endfor %}",
        "{% for a in messages %}{% for b in messages if b.role == a.content %}{% endfor %}{% endfor %}",
    ],
    ids=["writes", "reads", "filters"],
)
def test_a_template_that_messages_keep_busy_is_stopped(template, monkeypatch):
    monkeypatch.setattr("chat.TEMPLATE_S", 0.1)
    chat = ChatTemplate(template, {})
    started_at = time.monotonic()
    with pytest.raises(TemplateError, match=r"longer than 0\.1 s"):
        chat.render([{"role": "user", "content": ""}] * 5000)
    assert time.monotonic() - started_at < 5, "25 million turns take longer"
    assert chat.render([{"role": "user", "content": ""}]) == "", "and the next chat has all the time again"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r if a < 0 %}{% else %}"
        "{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in [range(99999)] recursive %}{{ loop(a) if a is iterable and a is not string }}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{{ ([r] * 99999) | map('sum') | list | length }}",
    ],
    ids=["loops", "loops in a loop", "loops for nothing", "macros", "a loop that calls itself", "map"],
)
def test_a_template_that_keeps_itself_busy_is_stopped(template, monkeypatch):
    monkeypatch.setattr("chat.TEMPLATE_S", 0.1)
    started_at = time.monotonic()
    with pytest.raises(TemplateError, match=r"longer than 0\.1 s"):
        ChatTemplate(template, {}).render([USER])
    assert time.monotonic() - started_at < 5, "it would take minutes or years"


@pytest.mark.parametrize("bomb", ["9**(9**9)", "'ab' * 1000000000", "1000000000 * [1, 2]", "2**9999 * 2**9999", "10**9**9**99"])
def test_one_operation_in_a_template_cannot_take_all_time_and_memory(bomb):
    with pytest.raises(TemplateError, match=r"computes more with `\*+` than fits"):
        ChatTemplate("{{ " + bomb + " }}", {}).render([USER])


def test_a_template_may_multiply():
    template = "{{ 2**10 }} {{ 2**-1 }} {{ '=' * 5 }} {{ 3 * [0] }} {{ 1.5 * 4 }} {{ 'x' * -1 }}"
    assert ChatTemplate(template, {}).render([USER]) == "1024 0.5 ===== [0, 0, 0] 6.0 "


def test_a_template_that_writes_too_much_is_stopped(monkeypatch):
    monkeypatch.setattr("chat.TEMPLATE_CHARACTERS", 1000)
    chat = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert chat.render([{"role": "user", "content": "a" * 1000}])
    with pytest.raises(TemplateError, match="more than 1000 characters"):
        chat.render([{"role": "user", "content": "a" * 1001}])


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


# Preparing a model's tokenizer at boot


def test_encoding_adds_special_tokens_unless_told_otherwise(kinds):
    kind = kinds("llama")
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


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
def test_the_eos_token_of_the_tokenizer_is_known(tmp_path, eos):
    raw = tiny_tokenizers.byte_level()
    folder = save(raw, tmp_path, eos_token=eos)
    assert check(folder, tmp_path)["eos_token_ids"] == [raw.token_to_id("</s>")]


def test_the_eos_token_counts_even_if_it_is_not_flagged_as_special(tmp_path):
    raw = tiny_tokenizers.byte_level()
    raw.add_tokens(["<|end|>"])
    assert check(save(raw, tmp_path, eos_token="<|end|>"), tmp_path)["eos_token_ids"] == [raw.token_to_id("<|end|>")]


@pytest.mark.parametrize("eos", [None, "<|nowhere|>", 7, {"content": None}, {}, ["</s>"]])
def test_an_eos_token_that_names_none_is_passed_over(tmp_path, eos):
    assert check(save(tiny_tokenizers.byte_level(), tmp_path, eos_token=eos), tmp_path)["eos_token_ids"] == []


@pytest.mark.parametrize("end_of_turn", ["<|eot_id|>", "<|im_end|>", "<end_of_turn>"])
def test_an_end_of_turn_token_ends_answers_too(tmp_path, end_of_turn):
    raw = tiny_tokenizers.byte_level()
    raw.add_special_tokens([end_of_turn])
    expected = [raw.token_to_id("</s>"), raw.token_to_id(end_of_turn)]
    assert check(save(raw, tmp_path / "both", eos_token="</s>"), tmp_path / "both")["eos_token_ids"] == expected
    assert check(save(raw, tmp_path / "one"), tmp_path / "one")["eos_token_ids"] == expected[1:]


@pytest.mark.parametrize("eos", [None, "</s>"])
@pytest.mark.parametrize("end_of_turn", ["<|eot_id|>", "<|im_end|>", "<end_of_turn>"])
def test_text_that_looks_like_an_end_of_turn_ends_nothing(tmp_path, end_of_turn, eos):
    raw = tiny_tokenizers.byte_level()
    raw.add_tokens([end_of_turn])  # not a special token: an answer may well contain it
    expected = [] if eos is None else [raw.token_to_id(eos)]
    assert check(save(raw, tmp_path, eos_token=eos), tmp_path)["eos_token_ids"] == expected


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"version": "1.0"}', b'{\n"model": {\n}}', b"\xff\xfe"])
def test_a_corrupt_tokenizer_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read as a tokenizer: ") as refused:
        check(tmp_path, tmp_path)
    assert len(str(refused.value).splitlines()) == 1


def test_a_tokenizer_config_that_is_no_json_is_refused(tmp_path):
    folder = save(tiny_tokenizers.byte_level(), tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read as JSON"):
        check(folder, tmp_path)


def test_a_tokenizer_that_turns_text_into_nothing_is_refused(tmp_path):
    folder = save(tokenizers.Tokenizer(tokenizers.models.BPE()), tmp_path)
    with pytest.raises(ConfigError, match="turns text into nothing"):
        check(folder, tmp_path)


def test_as_a_process_it_prints_what_the_worker_must_know(tmp_path):
    folder = save(tiny_tokenizers.byte_level(), tmp_path, eos_token="</s>")
    done = subprocess.run([sys.executable, HERE / "text.py", folder, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [2]


def test_as_a_process_it_says_in_one_line_what_is_wrong(tmp_path):
    done = subprocess.run([sys.executable, HERE / "text.py", tmp_path, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{tmp_path / 'tokenizer.json'} cannot be read as a tokenizer")


@pytest.mark.parametrize("keep_stop", [True, False])
def test_what_is_held_back_comes_out_when_no_token_follows(keep_stop, tmp_path):
    byte_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    stream = TextStream(tokenizer, [], ["xyz"], keep_stop=keep_stop)
    ids = tokenizer.encode("axy") + tokenizer.encode("é")[:1]
    told = [piece for token_id in ids for piece in stream.push(token_id, 0.0, [])]
    told += stream.finish()
    assert "".join(piece.text for piece in told) == stream.text == "axy\ufffd"
    assert len(told) == len(ids)
    assert not stream.stopped


def test_a_broken_file_of_a_chat_template_stops_the_boot_with_its_name(tmp_path):
    byte_tokenizer(tmp_path)
    (tmp_path / "mine.json").write_text("{")
    command = [sys.executable, HERE / "text.py", tmp_path, tmp_path, tmp_path / "mine.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().startswith(f"{tmp_path / 'mine.json'} cannot be read as JSON")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_call_of_a_tool_at_the_end_of_a_chat_is_not_lost():
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}{{ m.tool_calls }}]{% endfor %}{{ add_generation_prompt }}", {}
    )
    text = template.render([{"role": "assistant", "content": "", "tool_calls": ["x"]}])
    assert text == "[assistant['x']]True"
