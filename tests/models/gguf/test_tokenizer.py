"""A GGUF file's keys give the tokenizer, the chat templates and the sampling of the checkpoint that it was made of."""

import json
import time

import pytest
import templates
import tokenizers
from ggufs import write_keys
from published import weights

from engine.defaults import sampling_defaults
from manifest import Manifest, read_json
from models.errors import ModelError
from models.gguf.container import read_gguf
from models.gguf.tokenizer import write_tokenizer
from text.template import ChatTemplate, TemplateError
from text.tokenizer import Tokenizer, read_facts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PADDING = 7  # tokens behind the vocabulary, as many models have them
TEXTS = [
    "I'm, you'RE, we've; they'LL don't IT'S",
    *("123456789012"[:count] for count in range(1, 13)),
    "a1b22c333d4444 3.14159 1,000,000 ½ ²",
    "日本語のテキストABC和中文한국어 apple工作1314151天",
    "ΓΔΘ ΛΞΩ αβγ ПРИВЕТ Привет мир ЁЛКА",
    "e\u0301cole na\u0308ive E\u0301TE\u0301 हिन्दी नमस्ते ไทย",
    "a  b   c    d\t\te \t f\n\ng\n\n\nh\r\n\r\ni \n \n\n j",
    " " * 40 + "x" + "\n" * 40 + "y",
    "  leading and trailing  ",
    "👨\u200d👩\u200d👧🏽 🙂🙃 𠀀 ✈️",
    "def f(x):\n\treturn {'a': [1, 2.5e-3]} // !!! --- ===/\n",
    "<0x0A> <0xE2> [PAD5] <b>x</b> \x00\x7f\u200b\ufeff",
    "",
]
# The name of the pre-tokenizer, the kind, and the architecture.
PUBLISHED = {
    "deepseek_v3": ("deepseek-v3", "gpt2", "deepseek2"),
    "gemma3": ("default", "llama", "gemma3"),
    "gpt4o": ("gpt-4o", "gpt2", "none"),
    "gptoss": ("gpt-4o", "gpt2", "gpt-oss"),
    "llama2": ("default", "llama", "llama"),
    "llama3_1": ("llama-bpe", "gpt2", "llama"),
    "mistral_nemo": ("tekken", "gpt2", "llama"),
    "qwen3": ("qwen2", "gpt2", "qwen3"),
}


def looks_special(token):
    """As llama.cpp's converter sees it."""
    ends = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    return token in ("<pad>", "<mask>") or any(token.startswith(begin) and token.endswith(end) for begin, end in ends)


def keys_of(folder, pre, kind, architecture):
    """What llama.cpp's converter writes of a tokenizer."""
    published = read_json(folder / "tokenizer.json")
    config = read_json(folder / "tokenizer_config.json")
    model = published["model"]
    added = {token["id"]: token for token in published["added_tokens"]}
    texts = {n: token for token, n in model["vocab"].items()} | {n: token["content"] for n, token in added.items()}
    tokens, types = [], []
    for n in range(max(texts) + 1 + PADDING):
        token = texts.get(n, f"[PAD{n}]")
        if n not in texts:
            types.append(UNUSED)
        elif n not in added:
            types.append(BYTE if kind == "llama" and token.startswith("<0x") and len(token) == 6 else NORMAL)
        elif added[n]["special"] or looks_special(token):
            types.append(UNKNOWN if token == "<unk>" else CONTROL)
        else:
            types.append(USER_DEFINED)
            token = token.replace("▁", " ")
        tokens.append(token)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    keys = {"model": kind, "pre": pre, "tokens": tokens, "token_type": types}
    if kind == "gpt2":
        keys["merges"] = merges
    else:
        ranks = {merge.replace(" ", ""): rank for rank, merge in enumerate(merges)}
        # The scores of Gemma have no order that merges have.
        scores = [-float(ranks.get(token, 1e9)) for token in tokens]
        keys["scores"] = [float(n % 7) for n in range(len(tokens))] if architecture == "gemma3" else scores
        keys["add_space_prefix"] = published["normalizer"]["type"] == "Sequence"
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = config.get(f"{name}_token")
        token = token["content"] if isinstance(token, dict) else token
        keys[f"{key}_token_id"] = next((n for n, each in added.items() if each["content"] == token), None)
    keys["add_bos_token"] = config.get("add_bos_token")
    named = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return named | {"general.architecture": architecture, "tokenizer.chat_template": config.get("chat_template")}


def folder_of(tmp_path, keys):
    file = write_keys(tmp_path / "model.gguf", keys, len(keys["tokenizer.ggml.tokens"]))
    folder = tmp_path / "read"
    folder.mkdir()
    write_tokenizer(read_gguf(file), folder)
    return folder


def special_ids(tokenizer):
    return {n for n, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def bare(folder):
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.models
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_tokenizer_written_as_keys_gives_the_same_ids(name, tmp_path):
    published = templates.FOLDER / f"tokenizer-{name}" / "models"
    if not published.exists():
        pytest.skip("make test could not install the published tokenizers by npm")
    keys = keys_of(published, *PUBLISHED[name])
    began = time.process_time()
    folder = folder_of(tmp_path, keys)
    assert time.process_time() - began < 30  # merges of 262,144 tokens are rebuilt in two seconds
    ours, theirs = bare(folder), bare(published)
    added = theirs.get_added_tokens_decoder()
    some = [*added.values()][:60] + [*added.values()][-60:]
    for text in [*TEXTS, *(f"x{token.content}y {token.content}\n" for token in some if token.content.strip(" ▁"))]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert Tokenizer(folder).encode("a") == Tokenizer(published).encode("a")  # with BOS where the model has it
    looking = {n for n, token in added.items() if looks_special(token.content)}
    assert special_ids(ours) == special_ids(theirs) | looking
    assert ours.get_vocab_size() == len(keys["tokenizer.ggml.tokens"]) - keys["tokenizer.ggml.token_type"].count(UNUSED)


def published_file(name, tmp_path):
    if not weights.is_installed(name):
        pytest.skip(weights.WHY)
    write_tokenizer(read_gguf(weights.file(name)), tmp_path)
    return bare(tmp_path)


@pytest.mark.models
def test_smollm2_has_single_digits_and_its_chat_markers(tmp_path):
    tokenizer = published_file("smollm2", tmp_path)
    assert tokenizer.encode("a 123").tokens == ["a", "Ġ", "1", "2", "3"]
    assert tokenizer.encode("x<|im_start|>y").tokens == ["x", "<|im_start|>", "y"]
    assert read_facts(tmp_path, tmp_path)["eos_token_ids"] == [2]
    chat = ChatTemplate.load(tmp_path).render([{"role": "user", "content": "Hi"}])
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.models
def test_gemma3_reads_as_the_published_tokenizer(tmp_path):
    tokenizer = published_file("gemma3", tmp_path)
    published = templates.FOLDER / "tokenizer-gemma3" / "models"
    if not published.exists():
        pytest.skip("make test could not install the published tokenizers by npm")
    theirs = bare(published)
    for text in TEXTS:
        assert tokenizer.encode(text).ids == theirs.encode(text).ids


CHARACTERS = [chr(33 + n) for n in range(94)]
KEYS = {"model": "gpt2", "pre": "gpt-2", "tokens": CHARACTERS, "merges": ["! ?"], "bos_token_id": 0, "eos_token_id": 1}


def read(tmp_path, architecture="llama", others=(), **keys):
    """A tiny tokenizer: a token for each character from "!" on, "!?" and those in `more`, with their types."""
    more = {"!?": NORMAL} | keys.pop("more", {})
    given = KEYS | {"tokens": [*CHARACTERS, *more], "token_type": [NORMAL] * 94 + [*more.values()]} | keys
    named = {f"tokenizer.ggml.{name}": value for name, value in given.items()}
    return folder_of(tmp_path, {"general.architecture": architecture} | named | dict(others))


SENTENCEPIECE = {"model": "llama", "pre": "default", "merges": None}


def sentencepiece(tmp_path, more=(), scores=(), **keys):
    """Tokens that begin with <unk> and ▁, then a token for each character; `more` in the order of their scores."""
    tokens = ["<unk>", "<s>", "</s>", "▁", *CHARACTERS, *more]
    types = [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 3)
    scores = [-1e9] * (len(tokens) - len(scores)) + list(scores)
    given = SENTENCEPIECE | {"tokens": tokens, "token_type": types, "scores": scores, "bos_token_id": 1, "eos_token_id": 2}
    return read(tmp_path, **given | keys)


def tokens_of(folder, text):
    tokenizer = bare(folder)
    return [tokenizer.id_to_token(n) for n in tokenizer.encode(text, add_special_tokens=False).ids]


@pytest.mark.parametrize(
    ("keys", "adds_bos"),
    [
        ({"pre": "llama-bpe"}, True),
        ({"pre": "tekken"}, True),
        ({"pre": "falcon-h1"}, True),
        ({"pre": "qwen2"}, False),
        ({"pre": "glm4"}, False),
        ({"pre": "gpt-2"}, False),
        ({"pre": "gpt-2", "add_bos_token": True}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "llama-bpe", "bos_token_id": None}, False),
        ({"pre": "llama-bpe", "bos_token_id": 1000}, False),
    ],
)
def test_a_text_begins_with_bos_where_the_file_says_so_or_the_kind_of_tokenizer(tmp_path, keys, adds_bos):
    tokenizer = bare(read(tmp_path, **keys))
    ids = tokenizer.encode("AB").ids
    assert (ids[0] == 0) is adds_bos
    assert ids[adds_bos:] == tokenizer.encode("AB", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({}, "<s>"),
        ({"add_bos_token": False}, "▁"),
        ({"bos_token_id": None}, "▁"),
        ({"bos_token_id": None, "add_bos_token": True}, "<s>"),
        ({"model": "gemma4", "merges": ["A B"], "more_tokens": ["AB"], "add_bos_token": False}, "<s>"),
    ],
)
def test_sentencepiece_begins_with_bos_by_default_and_gemma4_always(tmp_path, keys, first):
    more = keys.pop("more_tokens", [])
    assert bare(sentencepiece(tmp_path, more, [-1.0] * len(more), **keys)).encode("A").tokens[0] == first


def test_bos_without_an_id_is_that_of_llama_cpp_where_the_file_wants_it(tmp_path):
    assert bare(read(tmp_path, bos_token_id=None, add_bos_token=True)).encode("A").ids == [11, 32]


def test_eos_is_added_where_the_file_says_so(tmp_path):
    assert bare(read(tmp_path, add_eos_token=True)).encode("A").ids == [32, 1]


def test_control_tokens_are_special_in_their_own_spelling_at_their_own_id(tmp_path):
    tokens = {"<｜User｜>": CONTROL, "[PAD96]": UNUSED, "<｜begin▁of▁sentence｜>": CONTROL}
    tokenizer = bare(read(tmp_path, more=tokens))
    assert tokenizer.encode("a<｜User｜>b").ids == [64, 95, 65]
    assert tokenizer.token_to_id("<｜begin▁of▁sentence｜>") == 97
    assert special_ids(tokenizer) == {95, 97}


def test_user_defined_tokens_are_found_in_the_text_and_stay_in_the_response(tmp_path):
    folder = read(tmp_path, pre="qwen2", more={"<think>": USER_DEFINED, "a b  c": USER_DEFINED, "<thinker>": USER_DEFINED})
    assert tokens_of(folder, "x<think>a b  c<thinker>") == ["x", "<think>", "a b  c", "<thinker>"]
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("<think>a b  c")) == "<think>a b  c"


def test_padding_is_no_token(tmp_path):
    folder = read(tmp_path, pre="llama-bpe", more={"[PAD95]": UNUSED, "[PAD]": UNUSED})
    assert tokens_of(folder, "[PAD95]") == [*"[PAD95]"]
    assert bare(folder).token_to_id("[PAD95]") is None
    assert bare(folder).id_to_token(95) is None


def test_tokens_that_a_converter_took_for_text_are_special(tmp_path, caplog):
    template = {"tokenizer.chat_template": "{% for m in messages %}<start_of_turn>{{ m.content }}<br>{% endfor %}"}
    more = {"<start_of_turn>": NORMAL, "<|im_end|>": NORMAL, "<think>": USER_DEFINED, "<div>": NORMAL, "</s>": NORMAL}
    folder = read(tmp_path, others=template, more=more)
    assert special_ids(bare(folder)) == {95, 96}
    assert tokens_of(folder, "a<start_of_turn>b<|im_end|>") == ["a", "<start_of_turn>", "b", "<|im_end|>"]
    assert caplog.messages == ["model.gguf takes <start_of_turn>, <|im_end|> for text, which are special tokens"]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model": "bert"}, "has a tokenizer of the kind bert; gemma4, gpt2, llama can be read"),
        ({"model": None}, "has a tokenizer of the kind None; gemma4, gpt2, llama can be read"),
        ({"model": "x" * 5000}, "has a tokenizer of the kind x+ .* can be read"),
        ({"pre": "viking"}, "has the pre-tokenizer viking, which is not known"),
        ({"pre": "kimi-k2"}, "has the pre-tokenizer kimi-k2, which is not known"),
        ({"pre": None}, "has the pre-tokenizer default, which is not known"),
        ({"pre": "default"}, "has the pre-tokenizer default, which is not known"),
        ({"merges": None}, "has no merges of tokens"),
        ({"token_type": None}, "has 95 tokens, 0 types of them and 95 embeddings"),
        ({"token_type": [1] * 94}, "has 95 tokens, 94 types of them and 95 embeddings"),
        ({"more": {"a": NORMAL}}, "has a token twice"),
    ],
)
def test_a_tokenizer_that_is_not_known_or_not_whole_is_refused_by_name(tmp_path, keys, reason):
    with pytest.raises(ModelError, match=rf"^model.gguf {reason}; serve the checkpoint") as refused:
        read(tmp_path, **keys)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("merges", [["!?"], ["! €"], ["€ ?"], ["! ?!"], ["! " + "?" * 5000]])
def test_a_merge_of_what_is_no_token_is_refused(tmp_path, merges):
    with pytest.raises(ModelError, match=r"^model.gguf has a tokenizer that cannot be read: ") as refused:
        read(tmp_path, merges=merges)
    assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


def test_the_parts_of_a_merge_may_hold_spaces(tmp_path):
    folder = sentencepiece(tmp_path, [" ", " a", "b c", " ab c"], [0.0] * 4, merges=["  a", " a b c"])
    assert bare(folder).token_to_id(" ab c") == 101


def test_a_tokenizer_has_as_many_tokens_as_the_model_has_embeddings(tmp_path):
    keys = {"general.architecture": "llama"} | {f"tokenizer.ggml.{name}": value for name, value in KEYS.items()}
    file = write_keys(tmp_path / "model.gguf", keys | {"tokenizer.ggml.token_type": [1] * 94}, 95)
    with pytest.raises(ModelError, match="has 94 tokens, 94 types of them and 95 embeddings"):
        write_tokenizer(read_gguf(file), tmp_path)


def test_without_a_name_of_the_pre_tokenizer_llama_3_is_known_by_its_tokens(tmp_path):
    tokens = [*CHARACTERS, *(f"w{n}" for n in range(94, 128_256))]
    tokens[100], tokens[128_000], tokens[128_009] = "ab", "<|begin_of_text|>", "<|eot_id|>"
    types = [NORMAL] * 128_000 + [CONTROL] * 256
    folder = read(tmp_path, pre=None, tokens=tokens, token_type=types, merges=["a b"])
    assert bare(folder).encode("a").ids == [0, 64]


@pytest.mark.parametrize(
    ("pre", "text"),
    [(name, "\u00e9") for name in ("qwen2", "deepseek-r1-qwen", "qwen35", "megrez", "kormo", "stablelm2", "olmo", "command-r")]
    + [(name, "e\u0301") for name in ("lfm2", "gpt-2", "smollm", "hunyuan", "tekken", "gpt-4o")],
)
def test_a_text_is_composed_where_the_tokenizer_of_the_family_does_it(tmp_path, pre, text):
    tokenizer = bare(read(tmp_path, pre=pre))
    assert (tokenizer.normalizer.normalize_str("e\u0301") if tokenizer.normalizer else "e\u0301") == text


@pytest.mark.parametrize(("pre", "tokens"), [("llama-bpe", ["abc"]), ("jina-v5-nano", ["abc"]), ("dbrx", [*"abc"])])
def test_whole_words_of_the_vocabulary_need_no_merges_where_the_family_does_it(tmp_path, pre, tokens):
    assert tokens_of(read(tmp_path, pre=pre, more={"abc": NORMAL}), "abc") == tokens


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["Ġ", "1", "2", "3", "4", "Ġab"]),
        ("starcoder", ["Ġ", "1", "2", "3", "4", "Ġab"]),
        ("stablelm2", ["Ġ", "1", "2", "3", "4", "Ġab"]),
        ("qwen35", ["Ġ", "1", "2", "3", "4", "Ġab"]),
        ("tekken", ["Ġ", "1", "2", "3", "4", "Ġab"]),
        ("llama-bpe", ["Ġ", "123", "4", "Ġab"]),
        ("gpt-4o", ["Ġ", "123", "4", "Ġab"]),
        ("deepseek-v3", ["Ġ", "123", "4", "Ġab"]),
        ("gpt-2", ["Ġ1234", "Ġab"]),
        ("falcon", ["Ġ", "123", "4", "Ġab"]),
    ],
)
def test_numbers_are_split_as_the_pre_tokenizer_of_the_file_does(tmp_path, pre, words):
    tokenizer = bare(read(tmp_path, pre=pre))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(" 1234 ab")] == words


def test_marks_join_letters_in_qwen35_alone(tmp_path):
    text = "हिन्दी"
    words = {}
    for pre in ("qwen2", "qwen35"):
        (tmp_path / pre).mkdir()
        words[pre] = len(bare(read(tmp_path / pre, pre=pre)).pre_tokenizer.pre_tokenize_str(text))
    assert words["qwen2"] > words["qwen35"] == 1


@pytest.mark.parametrize(
    ("architecture", "scores", "tokens"),
    [
        ("llama", [-1.0, -2.0, -3.0], ["▁", "ab", "c"]),
        ("llama", [-2.0, -1.0, -3.0], ["▁", "a", "bc"]),
        ("gemma3", [-2.0, -1.0, -3.0], ["▁", "ab", "c"]),
    ],
)
def test_merges_are_rebuilt_by_the_scores_and_those_of_gemma_by_the_ids(tmp_path, architecture, scores, tokens):
    folder = sentencepiece(tmp_path, ["ab", "bc", "xy"], scores, architecture=architecture)
    assert tokens_of(folder, "abc") == tokens


def test_no_merge_leads_to_a_special_token_or_to_a_byte(tmp_path):
    """Or a text that spells it, and that is escaped, would become the token."""
    more = ["s>", "<0", "<0x", "0A", "0A>", "<0x0A>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * 100 + [BYTE]
    folder = sentencepiece(tmp_path, more, [-1.0] * 6, token_type=types)
    assert tokens_of(folder, "<0x0A>\n") == ["▁", "<0x", "0A>", "<0x0A>"]
    tokenizer = bare(folder)
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("<s>", add_special_tokens=False).tokens == ["▁", "<", "s>"]


@pytest.mark.parametrize(("is_added", "words"), [(None, ["<s>", "▁A", "B"]), (False, ["<s>", "A", "B"])])
def test_a_word_of_sentencepiece_begins_with_a_space_where_the_file_has_no_other_wish(tmp_path, is_added, words):
    folder = sentencepiece(tmp_path, ["▁A"], [-1.0], add_space_prefix=is_added)
    assert tokens_of(folder, "<s>AB") == words
    assert Tokenizer(folder).decode(Tokenizer(folder).encode("AB")) == "AB"


def test_runs_of_newlines_are_one_token_of_gemma4(tmp_path):
    more = ["\n", "\n\n", "\n\n\n", "▁▁", "<0x0A>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * 99 + [BYTE]
    merges = ["\n\n \n", "\n \n", "▁ ▁"]
    folder = sentencepiece(tmp_path, more, [0.0] * 5, model="gemma4", architecture="gemma4", merges=merges, token_type=types)
    assert tokens_of(folder, "a\n\n\nb  c\n<0x0A>") == ["a", "\n\n\n", "b", "▁▁", "c", "\n", *"<0x0A>"]


@pytest.mark.parametrize(
    ("architecture", "tokens"),
    [
        ("phi3", ["<|user|>", "▁", "A", "</s>", "▁", "B", "<s>", "▁", "▁", "C"]),
        ("llama", ["<|user|>", "▁", "▁", "▁", "A", "</s>", "▁", "▁", "B", "<s>", "▁", "▁", "C"]),
    ],
)
def test_tokens_of_phi_3_take_the_spaces_behind_them(tmp_path, architecture, tokens):
    types = [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * 95 + [CONTROL]
    folder = sentencepiece(tmp_path, ["<|user|>"], [0.0], token_type=types, architecture=architecture)
    assert tokens_of(folder, "<|user|>  A</s> B<s> C") == tokens


def test_tokens_of_bytes_that_are_no_text_are_left_out(tmp_path):
    tokens = [*(character.encode() for character in CHARACTERS), b"\xff\xfe", b"", b"AB"]
    folder = read(tmp_path, tokens=tokens, token_type=[NORMAL] * 97, merges=["A B"])
    assert bare(folder).get_vocab_size() == 95
    assert tokens_of(folder, "AB") == ["AB"]


def test_a_special_token_of_bytes_that_are_no_text_is_refused(tmp_path):
    tokens = [*(character.encode() for character in CHARACTERS), b"<\xff>"]
    with pytest.raises(ModelError, match=r"^model.gguf has a tokenizer that cannot be read: TypeError"):
        read(tmp_path, tokens=tokens, token_type=[NORMAL] * 94 + [CONTROL], merges=["A B"])


def test_without_types_all_tokens_of_sentencepiece_are_text_but_those_that_end_it(tmp_path):
    folder = sentencepiece(tmp_path, ["<|im_end|>"], [0.0], token_type=None)
    assert special_ids(bare(folder)) == {98}


@pytest.mark.parametrize(("size", "is_taken"), [(400, False), (95, True)])
def test_an_embedded_tokenizer_is_taken_where_its_size_fits(tmp_path, size, is_taken):
    vocabulary = {chr(0x4E00 + n): n for n in range(size)}
    embedded = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    folder = read(tmp_path, others={"tokenizer.huggingface.json": embedded.to_str()})
    assert (bare(folder).token_to_id("\u4e00") == 0) is is_taken


def test_an_embedded_tokenizer_that_cannot_be_parsed_is_passed_over(tmp_path):
    assert tokens_of(read(tmp_path, others={"tokenizer.huggingface.json": "{}"}), "!?") == ["!?"]


ENDS = {
    "ids of keys": ({"eot_token_id": 2, "eom_token_id": 3, "fim_sep_token_id": 4}, {}, {1, 2, 3, 4}),
    "an id of no token": ({"eot_token_id": 1000}, {}, {1}),
    "names of any type": (
        {},
        {"<|eot_id|>": CONTROL, "<|end|>": NORMAL, "[EOS]": USER_DEFINED, "<x>": CONTROL},
        {1, 95, 96, 97},
    ),
    "gpt-oss": ({}, {"<|return|>": CONTROL, "<|call|>": CONTROL, "<|end|>": CONTROL}, {1, 95, 96}),
    "gpt-oss, by key": ({"eot_token_id": 97}, {"<|return|>": CONTROL, "<|call|>": CONTROL, "<|end|>": CONTROL}, {1, 95, 96}),
    "Solar": ({}, {"<|flush|>": CONTROL, "<|calls|>": CONTROL, "<|end|>": CONTROL}, {1, 95, 96}),
    "Phi-3": ({}, {"<|end|>": CONTROL, "<|endoftext|>": CONTROL}, {1, 95, 96}),
    "Gemma 3": ({}, {"<end_of_turn>": CONTROL, "</s>": USER_DEFINED, "<eos>": CONTROL}, {1, 95, 97}),
    "Gemma 4": ({}, {"<turn|>": CONTROL, "<|tool_response>": USER_DEFINED, "</s>": CONTROL}, {1, 95, 96}),
    "Qwen": ({}, {"</s>": NORMAL, "<|im_end|>": CONTROL, "<|file_sep|>": CONTROL, "<|fim_pad|>": CONTROL}, {1, 96, 97, 98}),
    "Llama 2": ({}, {"</s>": CONTROL}, {1, 95}),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_response_ends_at_the_ids_of_keys_and_at_the_tokens_that_end_a_turn(tmp_path, name):
    keys, more, ids = ENDS[name]
    more = {"!?": NORMAL} | more
    folder = read(tmp_path, more=more, **keys)
    assert set(read_json(folder / "generation_config.json")["eos_token_id"]) == ids


def chat(folder, tools=None):
    return ChatTemplate.load(folder).render([{"role": "user", "content": "Hi"}], tools)


DEFAULT, TOOL_USE, RAG = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use", "tokenizer.chat_template.rag")
NAMES = {"tokenizer.chat_templates": ["tool_use", "rag"]}


def test_templates_with_names_are_written_as_checkpoints_have_them(tmp_path):
    folder = read(tmp_path, others={DEFAULT: "default", TOOL_USE: "tools", RAG: "rag"} | NAMES)
    template = ChatTemplate.load(folder)
    assert (template.source, template.for_tools.source) == ("default", "tools")


def test_a_template_for_tools_alone_is_for_every_chat(tmp_path):
    assert chat(read(tmp_path, others={TOOL_USE: "tools", RAG: "rag"} | NAMES)) == "tools"


def test_chats_are_refused_by_the_names_of_templates_where_none_is_for_chats(tmp_path):
    folder = read(tmp_path, others={RAG: "rag", 'tokenizer.chat_template.a"}}': "b"} | NAMES)
    reason = r"^model.gguf has no default chat template, but tokenizer.chat_template.rag, tokenizer.chat_template.a\"}}$"
    with pytest.raises(TemplateError, match=reason):
        chat(folder)


def test_without_a_template_none_is_made_up(tmp_path):
    assert ChatTemplate.load(read(tmp_path)) is None


def test_a_template_is_known_by_its_key(tmp_path):
    assert ChatTemplate.load(read(tmp_path, others={DEFAULT: "inside"})).origin == DEFAULT


def test_a_template_beside_the_file_wins(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("beside é")
    folder = read(tmp_path, others={DEFAULT: "inside", TOOL_USE: "tools"})
    assert chat(folder, tools=[]) == "beside é"
    assert ChatTemplate.load(folder).origin == "chat_template.jinja"


def test_a_template_reads_the_special_tokens_of_the_files_ids_and_all_functions(tmp_path):
    source = (
        "{{ bos_token }}|{{ eos_token }}|{{ strftime_now('%Y') | length }}|{{ {'é': 1} | tojson(ensure_ascii=true) }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endfor %}"
    )
    folder = read(tmp_path, others={DEFAULT: source}, bos_token_id=None)
    assert chat(folder) == '|"|4|{"\\u00e9": 1}Hi'


@pytest.mark.parametrize(
    ("given", "defaults"),
    [
        (
            {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "penalty_repeat": 1.05},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05},
        ),
        ({"temp": 0.0, "top_k": 0, "min_p": 0.0}, {"temperature": 0.0, "top_k": 0, "min_p": 0.0}),
        ({"penalty_last_n": 64, "mirostat": 2, "xtc_probability": 0.5, "sequence": "kt"}, {}),
        ({}, {}),
    ],
)
def test_the_sampling_of_a_file_is_the_default_as_that_of_generation_config_is(tmp_path, given, defaults):
    folder = read(tmp_path, others={f"general.sampling.{key}": value for key, value in given.items()})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    manifest = Manifest.read(folder)
    assert sampling_defaults(manifest, "host") == defaults
    assert manifest.eos_token_ids == (1,)
