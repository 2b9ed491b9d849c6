"""Small tokenizers, one of each kind that published models come with, made in a few milliseconds from a few lines of text.

`KINDS` maps a kind's name to the function that builds it; `save` writes one as a model folder holds it; `kind_of` gives one
as the library and as the server know it. With texts and ids to try them with.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import text.tokenizer
from config import DEMO_MODEL

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "A server answers one request after another; the other requests wait in line.",
    "Ein kleiner Bär läuft über die Straße. Où est le café? Здравствуй, мир!",
    "日本語の文章と한국어 문장, العربية والعبرية. 1234567890 (a + b) * c = d\n\n\tdef f(x): return x\n",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: every token is a run of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_level_with_added() -> Tokenizer:
    """With tokens that were added later, in plain text: outside the byte alphabet, with spaces, special and not."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["<think>", "new line", "日本 語", "naïve €", " lead", "été"])
    tokenizer.add_special_tokens(["<|im_end|>", "<|ünd|>"])
    return tokenizer


def byte_level_in_sequence() -> Tokenizer:
    """Byte-level, but with a second decoder behind it, so that tokens are no longer plain runs of bytes."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def _with_byte_fallback() -> Tokenizer:
    normalizer = normalizers.Replace(" ", "▁")
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizer
    learned.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    learned.train_from_iterator(TEXTS[:2], trainers.BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *BYTES, *sorted({*model["vocab"], "▁", "▁▁", "▁▁▁▁", "é"})])}
    merges = [tuple(pair) for pair in model["merges"]] + [("▁", "▁"), ("▁▁", "▁▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def llama() -> Tokenizer:
    """As Llama 2 and Mistral: a space goes before the text and is taken off again; unknown characters become bytes."""
    tokenizer = _with_byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def gemma() -> Tokenizer:
    """Byte fallback without the space before the text, and tokens that were added."""
    tokenizer = _with_byte_fallback()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens(["\n\n", "<unused0>", "日本 語"])
    tokenizer.add_special_tokens(["<start_of_turn>", "<end_of_turn>"])
    return tokenizer


def metaspace_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=["▁"], show_progress=False)
    )
    tokenizer.add_tokens(["<sep>", "two words"])
    return tokenizer


def metaspace_unigram() -> Tokenizer:
    """As T5's relatives: the likeliest split of a text, spaces written as ▁."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def suffix_bpe() -> Tokenizer:
    """As the first GPT: a word's last token ends in </w>. With added tokens, special and not."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False)
    )
    tokenizer.add_tokens(["two words", "日本 語", " naïve ", AddedToken("<sep>", normalized=False)])
    tokenizer.add_special_tokens(["<|ünd|>", "<a b>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT: what continues a word begins with ##."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False))
    return tokenizer


def word_level() -> Tokenizer:
    """Whole words and no decoder at all: they are joined by spaces. Knows no "a"."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    tokenizer.add_tokens(["two words"])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level-with-added": byte_level_with_added,
    "byte-level-in-sequence": byte_level_in_sequence,
    "llama": llama,
    "gemma": gemma,
    "metaspace-bpe": metaspace_bpe,
    "metaspace-unigram": metaspace_unigram,
    "suffix-bpe": suffix_bpe,
    "word-piece": word_piece,
    "word-level": word_level,
}
ALL = [*KINDS, "demo"]  # the demonstration model's, too


def save(tokenizer: Tokenizer, folder: Path, **tokenizer_config) -> Path:
    """Writes `tokenizer.json` into `folder`, and `tokenizer_config.json` if it is to say something."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


# What texts are made of here: one, two, three and four bytes, several characters that are one to the eye, words and spaces.
PARTS = [
    " ",
    "  ",
    "\n",
    "\t",
    ".",
    "a",
    "b",
    "dog",
    " the",
    "é",
    "e\u0301",
    "ß",
    "ع",
    "€",
    "日",
    "語",
    "二",
    "𠀀",
    "😀",
    "👨‍👩‍👧",
    "🏳️‍🌈",
]
ANY_TEXT = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)

REAL_TEXTS = {
    "emoji": "Great! 😀 and 👨‍👩‍👧‍👦, 🏳️‍🌈🇫🇷👍🏽!",
    "cjk": "日本語の文章です。한국어, 漢字㐀𠀀𠀀",
    "combining marks": "e\u0301 n\u0303 a\u0308\u0323 हिन्दी ภาษาไทย",
    "mixed scripts": "naïve Здравствуй, мир — العربية, שלום; x²≤√π",
    "spaces": "  two leading,   three inside, and trailing  ",
    "newlines": "line\n\n\tindented\r\n  end\n",
    "an emoji at the end": "Bye 😀",
}
# These lose nothing: what is encoded comes back as it was.
LOSSLESS = ["byte-level", "byte-level-with-added", "byte-level-in-sequence", "llama", "gemma", "demo"]


@dataclass(frozen=True, eq=False)
class Kind:
    """A tokenizer as the library knows it, and as the server does."""

    raw: Tokenizer
    tokenizer: text.tokenizer.Tokenizer
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


@functools.cache
def kind_of(name: str) -> Kind:
    """One of `ALL`, made once."""
    folder = DEMO_MODEL if name == "demo" else save(KINDS[name](), Path(tempfile.mkdtemp()))
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Kind(raw, text.tokenizer.Tokenizer(folder), folder)


@functools.cache
def any_ids(kind: Kind, max_chunks: int):
    """Ids of all sorts: any at all, also some that no token has; added and special ones; runs that make characters."""
    chunks = [[i] for i in range(kind.raw.get_vocab_size() + 5)]
    telling = [kind.ids(part) for part in PARTS] + [[i] for i in kind.raw.get_added_tokens_decoder()]
    chunks += telling * (len(chunks) // len(telling) + 1)  # about half of what is drawn
    numbers = st.lists(st.integers(0, len(chunks) - 1), max_size=max_chunks)
    return numbers.map(lambda drawn: [i for number in drawn for i in chunks[number]])
