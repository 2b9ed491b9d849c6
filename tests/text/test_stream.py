"""Text as it streams is the text as a whole, whatever the tokenizer: nothing lost, nothing doubled, nothing half a character.

Each promise is held for every kind of tokenizer in `tiny_tokenizers` and for the demonstration model's own. The reference is
always the library's decoding of all ids at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes.tokenizer import byte_tokenizer
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_tokenizers import ALL, ANY_TEXT, LOSSLESS, REAL_TEXTS, Kind, any_ids, kind_of

from text import stream as stream_module
from text.escaping import Markers
from text.stream import Piece, TextStream, detokenizer_for, find_stop, prompt_texts
from text.tokenizer import Tokenizer

# With a decoder behind the byte-level one that holds for text, which real answers are; not for bytes that make none.
EXACT = [kind for kind in ALL if kind != "byte-level-in-sequence"]


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
def test_a_stream_is_exactly_what_decoding_everything_adds_to_the_prompt(name, data):
    kind = kind_of(name)
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
def test_a_character_that_the_prompt_began_comes_out_whole_and_nothing_of_the_prompt_is_repeated(name, data):
    kind = kind_of(name)
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
def test_an_answer_without_text_has_none_even_if_the_prompt_ends_inside_a_character(name):
    kind = kind_of(name)
    prompt = kind.ids("dog 😀")[:-1]
    assert kind.decode(prompt).endswith("\ufffd")
    special = next(i for i in sorted(kind.tokenizer.special_ids))
    stream, (piece,) = run(kind.tokenizer, prompt, [special])
    assert (stream.text, piece.text, piece.special) == ("", kind.raw.id_to_token(special), True)


@pytest.mark.parametrize("string", REAL_TEXTS.values(), ids=REAL_TEXTS)
@pytest.mark.parametrize("name", ALL)
def test_real_text_streams_as_it_is(name, string):
    kind = kind_of(name)
    prompt, ids = kind.ids("The dog"), kind.ids(string)
    stream, pieces = run(kind.tokenizer, prompt, ids)
    whole = kind.added_text(prompt, ids)
    assert text_of(pieces) == stream.text == whole
    assert "\ufffd" not in whole
    assert not any("\ufffd" in piece.text for piece in pieces)


@pytest.mark.parametrize("name", ["llama", "metaspace-bpe", "metaspace-unigram"])
def test_a_space_that_begins_an_answer_is_kept_behind_a_prompt_and_taken_off_where_it_begins_the_text(name):
    kind = kind_of(name)
    answer = kind.ids("dog")
    assert kind.raw.id_to_token(answer[0]).startswith("▁")
    assert run(kind.tokenizer, kind.ids("The quick"), answer)[0].text == " dog"
    assert run(kind.tokenizer, [kind.id("<s>")], answer)[0].text == run(kind.tokenizer, [], answer)[0].text == "dog"


def test_tokens_inside_a_character_are_empty_and_the_one_that_completes_it_carries_it():
    kind = kind_of("byte-level")
    ids = kind.ids("😀")
    assert len(ids) == 4
    stream = TextStream(kind.tokenizer, kind.ids("dog"))
    released = [[piece.text for piece in stream.push(i, -0.5, [])] for i in ids]
    assert released == [[], [""], [""], ["", "😀"]], "only the last piece waits"
    assert stream.text == "😀", "nothing is held back once the character is complete"


def test_bytes_that_may_still_change_come_with_the_token_behind_them():
    kind = kind_of("llama")
    ids = [kind.id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    stream = TextStream(kind.tokenizer, kind.ids("dog"))
    released = [[piece.text for piece in stream.push(i, -0.5, [])] for i in [*ids, kind.id("f")]]
    assert released == [[], [""], [""], [""], ["", "😀f"]], "only the last piece waits"
    assert [piece.text for piece in run(kind.tokenizer, kind.ids("dog"), ids)[1]] == ["", "", "", "😀"]


def test_bytes_that_are_no_character_are_told_as_the_library_tells_them():
    kind = kind_of("llama")
    ids = [kind.id("<0xE2>"), kind.id("<0x82>"), kind.id("f"), kind.id("<0xFF>")]
    assert run(kind.tokenizer, [], ids)[0].text == kind.decode(ids) == "\ufffd\ufffdf\ufffd"


@pytest.mark.parametrize("name", ALL)
def test_special_tokens_show_their_name_are_marked_and_are_not_in_the_text(name):
    kind = kind_of(name)
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


def test_eos_ids_of_the_model_are_special_even_where_the_tokenizer_does_not_say_so():
    kind = kind_of("gemma")
    end = kind.id("<unused0>")
    assert "<unused0>" in kind.decode([end])
    tokenizer = Tokenizer(kind.folder, [end])
    stream, pieces = run(tokenizer, kind.ids("The"), [*kind.ids(" dog"), end])
    assert stream.text == " dog"
    assert (pieces[-1].text, pieces[-1].special) == ("<unused0>", True)
    assert tokenizer.decode([*kind.ids("dog"), end]) == "dog"
    assert tokenizer.token_text(end) == "<unused0>"


@pytest.mark.parametrize("name", ALL)
def test_an_id_without_a_token_has_no_text_and_harms_none(name):
    kind = kind_of(name)
    beyond = kind.raw.get_vocab_size() + 100
    prompt, word = kind.ids("The"), kind.ids("dog")
    stream, pieces = run(kind.tokenizer, [*prompt, beyond], [beyond, *word, beyond])
    assert stream.text == kind.added_text(prompt, word)
    assert [piece.special for piece in pieces] == [False] * len(pieces)
    assert kind.tokenizer.token_text(beyond) == ""


def test_a_special_token_inside_a_character_does_not_break_it():
    for name in ["byte-level", "llama"]:
        kind = kind_of(name)
        first, *rest = kind.ids("😀")[-4:]
        assert run(kind.tokenizer, kind.ids("The"), [first, kind.id("</s>"), *rest])[0].text == "😀"


@pytest.mark.parametrize("name", ["byte-level", "llama"])
def test_a_character_that_is_cut_before_a_special_token_stays_before_it_in_parts(name):
    """The token may end the reasoning: U+FFFD in front of the content would break its JSON."""
    kind, told = kind_of(name), []

    def parse(piece, text):
        told.append(text)
        return text, 0

    ids = [kind.id("a"), kind.ids("😀")[-4], kind.id("</s>"), kind.id("a")]
    stream, pieces = run(kind.tokenizer, kind.ids("The"), ids, parse=parse)
    assert "".join(told) == "a\ufffd</s>a" and stream.text == text_of(pieces) == "a\ufffda"


def test_what_is_told_of_a_token_travels_with_its_piece():
    kind = kind_of("byte-level")
    stream = TextStream(kind.tokenizer, [])
    (piece,) = stream.push(kind.id("a"), -1.25, [(5, -0.5), (6, -2.0)], last=True)
    assert piece == Piece(kind.id("a"), "a", -1.25, False, [(5, -0.5), (6, -2.0)])


# Tokens and the bytes and texts they stand for


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
def test_the_texts_of_a_prompts_tokens_add_up_to_it_and_special_ones_give_their_name(name, data):
    kind = kind_of(name)
    ids = data.draw(any_ids(kind, 10))
    texts = list(zip(ids, prompt_texts(kind.tokenizer, ids), strict=True))
    assert "".join(told for i, told in texts if i not in kind.tokenizer.special_ids) == kind.tokenizer.decode(ids)
    assert all(told == kind.raw.id_to_token(i) for i, told in texts if i in kind.tokenizer.special_ids)


def test_in_a_prompts_texts_a_character_is_with_the_token_that_completes_it():
    kind = kind_of("byte-level")
    assert prompt_texts(kind.tokenizer, [kind.id("</s>"), *kind.ids("😀a")]) == ["</s>", "", "", "", "😀", "a"]


# Stop strings


@pytest.mark.parametrize(
    ("name", "tokens", "stops", "text"),
    [
        ("byte-level", "xSTOPy", ["STOP"], "xSTOP"),  # across tokens
        ("byte-level-with-added", ["new line", "a"], ["w l"], "new l"),  # inside a token
        ("byte-level-with-added", ["new line"], ["ew line", "w l"], "new l"),  # two in one token: the one that ends first
        ("byte-level", "adogandb", ["dogand", "dog"], "adog"),  # the one that is complete first
        ("byte-level", "aaabz", ["aab"], "aaab"),  # repeats its own beginning
        ("byte-level", "ababacz", ["abac"], "ababac"),
    ],
)
def test_text_ends_right_behind_the_stop_string_that_is_complete_first(name, tokens, stops, text):
    kind = kind_of(name)
    for order in (stops, stops[::-1]):
        stream, pieces = run(kind.tokenizer, [], [kind.id(token) for token in tokens], order)
        assert stream.stopped
        assert text_of(pieces) == stream.text == text
        assert len(pieces) == stream.tokens


@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma", "demo"])
def test_a_stop_string_may_be_of_any_script(name):
    kind = kind_of(name)
    for stop in ["語", "😀", "👨‍👩‍👧", "e\u0301"]:
        stream, pieces = run(kind.tokenizer, kind.ids("The dog"), kind.ids(f"a{stop}b"), [stop])
        assert stream.stopped
        assert text_of(pieces) == stream.text == kind.added_text(kind.ids("The dog"), kind.ids(f"a{stop}"))


def test_a_stop_string_in_text_that_was_held_to_the_end_is_found():
    kind = kind_of("llama")
    stream, pieces = run(kind.tokenizer, kind.ids("The"), kind.ids("x😀😀"), ["😀"])
    assert stream.stopped
    assert text_of(pieces) == stream.text == " x😀"
    assert len(pieces) == stream.tokens


def test_the_prompt_is_not_searched_for_stop_strings():
    kind = kind_of("byte-level")
    stream, _ = run(kind.tokenizer, kind.ids("the dog do"), [kind.id("g"), kind.id("a")], ["dog", "do"])
    assert (stream.text, stream.stopped) == ("ga", False)


def test_an_empty_stop_string_and_the_name_of_a_special_token_stop_nothing():
    kind = kind_of("byte-level")
    stream, _ = run(kind.tokenizer, [], [*kind.ids("the dog"), kind.id("</s>"), kind.id("a")], ["", "</s>"])
    assert (stream.text, stream.stopped) == ("the doga", False)


@given(string=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), data=st.data())
def test_find_stop_finds_the_end_of_the_first_complete_stop_string(string, stops, data):
    ends = [n for n in range(len(string) + 1) if any(string[:n].endswith(stop) for stop in stops)]
    scanned = data.draw(st.integers(0, ends[0] - 1 if ends else len(string)), label="scanned")
    assert find_stop(string, stops, scanned) == (ends[0] if ends else None)


@given(string=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_begun_is_the_longest_end_that_may_become_a_stop_string(string, stops):
    ends = [string[n:] for n in range(len(string) + 1)]
    assert Markers(stops).begun(string) == next(
        end for end in ends if end == "" or any(stop.startswith(end) and stop != end for stop in stops)
    )


def began(string: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `string` may become a stop string, the plain way."""
    return max((n for stop in stops for n in range(len(stop)) if string.endswith(stop[:n])), default=0)


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
def test_the_text_ends_at_the_first_stop_string_and_nothing_else_is_missing_or_shown_too_early(name, data):
    kind = kind_of(name)
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


def test_without_keep_stop_pieces_wait_while_they_may_become_a_stop_string():
    kind = kind_of("byte-level")
    assert released(kind, "xSTyz", ["STOP"]) == [["x"], [], [], ["S", "T", "y"], ["z"]]
    assert released(kind, "SSTOz", ["STOP"]) == [[], ["S"], [], [], ["S", "T", "O", "z"]], "only as many as must"
    assert released(kind, "xST", ["STOP"]) == [["x"], [], ["S", "T"]], "the last token sets them free"
    assert released(kind, "xSTOP", ["STOP"]) == [["x"], [], [], [], ["", "", "", ""]]


def test_without_keep_stop_a_piece_in_which_a_stop_string_begins_is_cut_there():
    kind = kind_of("byte-level-with-added")
    assert released(kind, ["new line", "a"], ["linea"]) == [[], ["new ", ""]]
    assert released(kind, ["new line", "b"], ["linea"]) == [[], ["new line", "b"]]


def test_without_keep_stop_a_special_token_among_held_pieces_keeps_its_place_and_its_name():
    kind = kind_of("byte-level")
    assert released(kind, ["S", "</s>", "T", "x"], ["ST"]) == [[], [], ["", "</s>", ""], ["x"]]
    assert released(kind, ["S", "</s>", "x"], ["ST"]) == [[], [], ["S", "</s>", "x"]]
    assert released(kind, ["</s>", "x", "</s>", "y"], ["ST"]) == [["</s>"], ["x"], ["</s>"], ["y"]]


def test_without_keep_stop_the_longest_of_those_complete_at_once_is_left_out():
    kind = kind_of("byte-level")
    for stops in (["OP", "STOP", "P"], ["STOP", "P", "OP"]):
        assert run(kind.tokenizer, [], [kind.id(c) for c in "xSTOPy"], stops, keep_stop=False)[0].text == "x"


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, "ab"), (2, "ab"), (3, "abab"), (4, "abab"), (5, "ababx"), (6, "ababx"), (99, "ababx")]
)
def test_a_stop_string_counts_if_it_ends_with_the_token_min_tokens_or_later(min_tokens, expected):
    kind = kind_of("byte-level")
    ids = [kind.id(character) for character in "ababx"]
    stream, _ = run(kind.tokenizer, [], ids, ["ab"], min_tokens=min_tokens)
    assert (stream.text, stream.stopped) == (expected, expected != "ababx")


def test_a_stop_string_may_begin_before_the_token_min_tokens():
    kind = kind_of("byte-level")
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


@pytest.mark.parametrize("name", ALL)
def test_a_token_costs_the_same_late_as_early(name, monkeypatch):
    kind = kind_of(name)
    tokenizer = CountingTokenizer(kind.folder)
    searched = []
    monkeypatch.setattr(stream_module, "find_stop", lambda *args: searched.append(len(args[0])) or find_stop(*args))
    sentence = kind.ids("The dog reads 日本語 😀 and the café minds.\n")
    prompt, ids = sentence * 100, sentence * 100
    tokenizer.decoded = []
    for stops in (["never", "at all"], ["#"]):
        assert run(tokenizer, prompt, ids, stops)[0].text == kind.added_text(prompt, ids)
    assert max(tokenizer.decoded, default=0) <= 40
    assert len(tokenizer.decoded) <= 2 * (2 * len(ids) + 10)
    assert max(searched) <= 60
    assert bool(tokenizer.decoded) == (not tokenizer.is_byte_level), "the count counts"


def test_a_token_costs_the_same_late_as_early_without_keep_stop(monkeypatch):
    kind = kind_of("byte-level")
    searched = []
    monkeypatch.setattr(stream_module, "find_stop", lambda *args: searched.append(len(args[0])) or find_stop(*args))
    begun = Markers.begun
    monkeypatch.setattr(Markers, "begun", lambda self, text: searched.append(len(text)) or begun(self, text))
    sentence = "The dog reads 日本語 😀 and the café minds.\n"
    stream, _ = run(kind.tokenizer, [], kind.ids(sentence) * 100, ["minds. Not", "\n\n"], keep_stop=False)
    assert stream.text == sentence * 100
    assert 0 < max(searched) <= 30


def test_a_long_run_of_bytes_costs_no_more_than_its_length():
    kind = kind_of("llama")
    tokenizer = CountingTokenizer(kind.folder)
    ids = kind.ids("😀" * 500 + "a")
    tokenizer.decoded = []
    assert run(tokenizer, [], ids)[0].text == "😀" * 500 + "a"
    assert sum(tokenizer.decoded) <= 3 * len(ids)


@pytest.mark.parametrize("name", ALL)
def test_a_prompt_of_tokens_without_text_costs_no_more_than_its_length(name):
    tokenizer = CountingTokenizer(kind_of(name).folder)
    unknown = 1_000_000
    for token_id in (*tokenizer.special_ids, unknown):
        tokenizer.decoded = []
        detokenizer_for(tokenizer, [token_id] * 1000)
        assert sum(tokenizer.decoded) <= 3 * 1000


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
