"""How byte-level tokenizers split a text into words, by the names that GGUF files have for it.

A name is the label of one published tokenizer and describes nothing: a name that is not listed is not known.

Source: the published tokenizers, which llama.cpp's own expressions differ from outside ASCII; llama.cpp has
the names, and what a file with such a name leaves out.
"""

from __future__ import annotations

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLIT_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK = "[\u4e00-\u9fa5\u3040-\u30ff]+"
LLAMA3_NAMES = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"

# What splits a text, by the names: each expression splits what the ones before it have left.
SPLITS = {
    name: splits
    for names, splits in {
        f"{LLAMA3_NAMES} dbrx smaug-bpe chatglm-bpe glm4": (SPLIT_LLAMA3,),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": (QWEN2,),
        "qwen35": (SPLIT_QWEN35,),
        "gpt-4o llama4 kanana2 minimax-m2": (O200K,),
        "tekken": (SPLIT_TEKKEN,),
        "deepseek-v3 hunyuan-dense joyai-llm": (r"\p{N}{1,3}", CJK, DEEPSEEK),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (r"\p{N}", GPT2),
        "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum granite-docling": (GPT2,),
        "falcon": (r"[\p{P}$+<=>^`|~]+", GPT2, "[0-9]{3}"),
    }.items()
    for name in names.split()
}
# Their texts are brought into the form NFC.
NORMALIZED = {
    "qwen2",
    "deepseek-r1-qwen",
    "kormo",
    "f2llmv2",
    "megrez",
    "stablelm2",
    "qwen35",
    "command-r",
    "mpt",
    "olmo",
}
# Whole words of their vocabularies need no merges, and texts begin with BOS where the file does not say.
LIKE_LLAMA3 = set(f"{LLAMA3_NAMES} tekken".split())
