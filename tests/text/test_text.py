"""Text as it streams is the text as a whole, whatever the tokenizer: nothing lost, nothing doubled, nothing half a character.

Each promise is held for every kind of tokenizer in `tiny_tokenizers` and for the demonstration model's own. The reference is
always the library's decoding of all ids at once; for chats it is transformers' `apply_chat_template`.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_tokenizers
import tokenizers
from fakes.tokenizer import byte_tokenizer
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import save

from config import DEMO_MODEL
from run import HERE, ConfigError
from text import tokenizer as text
from text.tokenizer import Piece, TextStream, Tokenizer, check, detokenizer_for, find_stop, stop_begun

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
    stream, ids = (TextStream(kind.tokenizer, [], stops, keep_stop=False, **options), [kind.id(token) for token in tokens])
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
