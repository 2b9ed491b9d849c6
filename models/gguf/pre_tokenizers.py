"""How byte-level tokenizers split a text into words, by the names that GGUF files have for it.

A name is the label of one published tokenizer and describes nothing: a name that is not listed is not known.

Source: the published tokenizers, which llama.cpp's own expressions differ from outside ASCII; llama.cpp has
the names, and what a file with such a name leaves out.
"""

from __future__ import annotations

from typing import NamedTuple

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGIT = r"\p{N}"
CJK = "[\u4e00-\u9fa5\u3040-\u30ff]+"


class PreTokenizer(NamedTuple):
    patterns: tuple[str, ...]  # each splits what the ones before it have left
    is_normalized: bool = False  # texts are brought into the form NFC
    # Words of the vocabulary need no merges, and a text begins with BOS where the file does not say.
    like_llama3: bool = False


PRE_TOKENIZERS = {
    name: pre_tokenizer
    for names, pre_tokenizer in (
        (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
            PreTokenizer((LLAMA3,), like_llama3=True),
        ),
        ("dbrx smaug-bpe chatglm-bpe glm4", PreTokenizer((LLAMA3,))),
        ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2", PreTokenizer((QWEN2,), is_normalized=True)),
        ("hunyuan solar-open grok-2", PreTokenizer((QWEN2,))),
        ("qwen35", PreTokenizer((QWEN35,), is_normalized=True)),
        ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((O200K,))),
        ("tekken", PreTokenizer((TEKKEN,), like_llama3=True)),
        ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer((r"\p{N}{1,3}", CJK, DEEPSEEK))),
        ("smollm starcoder refact codeshell exaone minerva-7b mellum2", PreTokenizer((DIGIT, GPT2))),
        ("command-r", PreTokenizer((DIGIT, GPT2), is_normalized=True)),
        ("gpt-2 phi-2 jais trillion exaone4 gigachat a.x-4.0 mellum granite-docling", PreTokenizer((GPT2,))),
        ("mpt olmo", PreTokenizer((GPT2,), is_normalized=True)),
        ("falcon", PreTokenizer((r"[\p{P}$+<=>^`|~]+", GPT2, "[0-9]{3}"))),
    )
    for name in names.split()
}
