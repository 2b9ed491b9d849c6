"""A GGUF file's tokenizer, chat templates and sampling defaults, from its keys, as the files of a checkpoint.

Texts get the ids of the published tokenizer that the file was made of. Source: the keys that llama.cpp's
converter writes, and what llama.cpp assumes where it writes none.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from manifest import TEMPLATE_ORIGIN
from models.child import shortened
from models.errors import named, reported_as
from models.gguf.container import TEMPLATE_FILE, GgufFile
from models.gguf.pre_tokenizers import LIKE_LLAMA3, NORMALIZED, SPLITS

logger = logging.getLogger("model")

Merges = list[tuple[str, ...]]  # pairs of tokens, those that are merged first at the beginning

# The kinds of tokenizers, and the id of BOS where a file wants it added and does not name it.
TOKENIZER_KINDS = {"gemma4": None, "gpt2": 11, "llama": 1}
NORMAL_TOKEN, UNKNOWN_TOKEN, CONTROL_TOKEN, USER_TOKEN, UNUSED_TOKEN = range(1, 6)  # types of tokens
# Tokens that end a response, whatever the file names as EOS; the last of them stand between files.
_ENDS = """
<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|endoftext|> <|end_of_text|> <end_of_turn> <end_of_utterance>
<turn|> <|tool_response> <｜end▁of▁sentence｜> <EOT> _<EOT> [EOT] [EOS] [e~[
<|return|> <|call|> <|calls|> <|flush|>
<|fim_pad|> <|fim_repo|> <|repo_name|> <reponame> <|file_sep|>
"""
ENDS = set(_ENDS.split())
SPECIAL_ENDS = {"</s>", "<eos>"}  # the same where they are special tokens: elsewhere they are HTML
# Of these none ends a response where the model has the others: <|end|> ends a part of it there.
NO_ENDS = [
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<|tool_response>"}),
]
# Llama 3 in files from before May 2024, which name no pre-tokenizer: how many tokens, and the ids of two.
OLD_LLAMA3 = (128_256, 128_000, 128_009)
NOT_STRIPPING = {"<s>", "<unk>", "<|endoftext|>"}  # Phi-3: its other tokens take the spaces behind them
# Fields of generation_config.json, and their keys. There is none for `penalty_last_n`: all tokens count.
SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
TEMPLATE = "tokenizer.chat_template"
TOOL_USE = f"{TEMPLATE}.tool_use"
NOT_UTF8 = re.compile(r"\A\Z|[\ud800-\udfff]")  # surrogates stand for bytes that are no UTF-8
MERGE = re.compile("(.[^ ]*) (.*)", re.DOTALL)  # the first part may begin with a space


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and, if there are any, the chat
    templates into `folder`, which exists. Logs text tokens that it takes for special ones. Raises ModelError
    for a tokenizer that is not known, or not complete, and for any other failure, such as a full disk; then
    some of the files may be there."""
    failure = f"{file.path.name} has a tokenizer that cannot be read"
    with reported_as(failure, lambda error: shortened(named(error))):
        templates = _templates(file)
        tokenizer = _embedded(file) or _from_keys(file, "".join(templates.values()))
        tokenizer.save(str(folder / "tokenizer.json"))
        if templates:
            _write_templates(file, templates, folder)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", TEMPLATE_ORIGIN: next(iter(templates), None)}
        for name in ("bos", "eos"):
            config[f"{name}_token"] = "".join(_token_named(file, name))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        generation = {"eos_token_id": _end_ids(file, tokenizer), "do_sample": True}
        for name, key in SAMPLING.items():
            if key in file.keys:
                generation[name] = round(file.keys[key], 6)  # float32 makes 0.949999988 of 0.95
        (folder / "generation_config.json").write_text(json.dumps(generation))


def _token_named(file: GgufFile, name: str, default: int | None = None) -> dict[str, int]:
    """Returns the special token that the file has for `name`, such as bos, with its id: {token: id}. If the
    file has none, or an id that is no token's, it is the token with the id `default`; {}: there is no default
    either."""
    tokens = file.tokenizer("tokens")
    token_id = file.tokenizer(f"{name}_token_id")
    if token_id not in range(len(tokens)):
        token_id = default
    return {} if token_id is None else {tokens[token_id]: token_id}


def _embedded(file: GgufFile) -> Tokenizer | None:
    """Returns the published tokenizer, if the file holds one that has no more tokens than the model has
    embeddings; None: it holds none, one that cannot be read, or a larger one."""
    try:
        tokenizer = Tokenizer.from_str(file.keys["tokenizer.huggingface.json"])
    except Exception:  # the library raises a bare Exception for whatever is wrong
        return None
    return tokenizer if tokenizer.get_vocab_size() <= file.vocab_size else None


def _from_keys(file: GgufFile, written: str) -> Tokenizer:
    """Makes the tokenizer that the keys describe. written: the chat templates, joined. Logs text tokens that
    it takes for special ones. Raises ModelError for a tokenizer that is not known, or whose tokens contradict
    each other."""
    kind = file.tokenizer("model")
    if kind not in TOKENIZER_KINDS:
        raise file.rejection(f"has a tokenizer of the kind {kind}; {', '.join(TOKENIZER_KINDS)} can be read")
    tokens = file.tokenizer("tokens") or []
    types = _token_types(file, tokens, written)
    # With the added tokens, to which the library would give other ids.
    ids = {token: n for n, token in enumerate(tokens) if types[n] != UNUSED_TOKEN}
    if len(ids) != len(tokens) - types.count(UNUSED_TOKEN):
        raise file.rejection("has a token twice")
    merges = [MERGE.fullmatch(merge).groups() for merge in file.tokenizer("merges") or ()]
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, ids, merges)
    else:
        normal = {token: n for token, n in ids.items() if types[n] == NORMAL_TOKEN}
        tokenizer = _sentencepiece(file, ids, merges or _rebuilt_merges(file, normal))
        adds_bos = True
    is_phi3 = kind == "llama" and file.architecture == "phi3"
    added = [
        AddedToken(
            token,
            rstrip=is_phi3 and token not in NOT_STRIPPING,
            normalized=False,
            special=token_type != USER_TOKEN,
        )
        for token, token_type in zip(tokens, types)
        if token_type in (UNKNOWN_TOKEN, CONTROL_TOKEN, USER_TOKEN)
    ]
    tokenizer.add_tokens(added)
    said = file.tokenizer("add_bos_token")
    if said is not None and kind != "gemma4":  # which needs BOS, whatever its files say
        adds_bos = said
    before = _token_named(file, "bos", TOKENIZER_KINDS[kind] if said else None) if adds_bos else {}
    after = _token_named(file, "eos") if file.tokenizer("add_eos_token") else {}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=[*before.items(), *after.items()]
    )
    return tokenizer


def _token_types(file: GgufFile, tokens: list[str], written: str) -> list[int]:
    """Returns the type of each token, by its id: that of the file, but for two cases. Text that is empty or
    no UTF-8 is an UNUSED_TOKEN. A token of ENDS, or text in <> that `written`, the chat templates, has, is a
    CONTROL_TOKEN, and a warning names it.

    Raises ModelError if the numbers of tokens, types and embeddings differ. In a file without types all
    tokens are normal ones; one with byte-level BPE needs types, and raises ModelError, too.
    """
    types = file.tokenizer("token_type")
    if types is None:
        types = [] if file.tokenizer("model") == "gpt2" else [NORMAL_TOKEN] * len(tokens)
    if not len(tokens) == len(types) == file.vocab_size:
        raise file.rejection(
            f"has {len(tokens)} tokens, {len(types)} types of them and {file.vocab_size} embeddings"
        )
    types = list(map(int, types))
    mended = []
    for n, token in enumerate(tokens):
        is_text = types[n] == NORMAL_TOKEN
        is_written = token.startswith("<") and token.endswith(">") and token in written
        if is_text and NOT_UTF8.search(token):
            types[n] = UNUSED_TOKEN
        elif types[n] != CONTROL_TOKEN and (token in ENDS or (is_text and is_written)):
            types[n] = CONTROL_TOKEN
            mended.append(token)
    if mended:
        logger.warning("%s takes %s for text, which are special tokens", file.path.name, ", ".join(mended))
    return types


def _byte_level(file: GgufFile, ids: dict[str, int], merges: Merges) -> tuple[Tokenizer, bool]:
    """Returns BPE of bytes, and whether a text begins with BOS where the file does not say. ids: of all
    tokens but unused ones. Raises ModelError for a file without merges, or with a pre-tokenizer that is not
    known."""
    if not merges:
        raise file.rejection("has no merges of tokens")
    name = file.tokenizer("pre") or "default"
    if name == "default" and (len(ids), ids.get("<|begin_of_text|>"), ids.get("<|eot_id|>")) == OLD_LLAMA3:
        name = "llama3"
    if name not in SPLITS:
        raise file.rejection(f"has the pre-tokenizer {name}, which is not known")
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=name in LIKE_LLAMA3))
    if name in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in LIKE_LLAMA3


def _sentencepiece(file: GgufFile, ids: dict[str, int], merges: Merges) -> Tokenizer:
    """Returns BPE of characters, with ▁ for a space, and with tokens of single bytes for characters that have
    no token. For Llama's kind a space is put in front of texts, unless the file says otherwise."""
    unknown = next(iter(_token_named(file, "unknown", 0)))
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    normalizer = [normalizers.Replace(" ", "▁")]
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.tokenizer("model") == "llama" and file.tokenizer("add_space_prefix") is not False:
        # A space begins a text, and what follows a special token.
        normalizer.insert(0, normalizers.Prepend("▁"))
        decoder.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer


def _rebuilt_merges(file: GgufFile, ids: dict[str, int]) -> Merges:
    """Returns every two tokens that make a third one: first those whose third token has the highest score;
    for Gemma, whose scores have another order, those whose third token has the lowest id. Of two pairs that
    make the same token, the one with the longer first part comes first. ids: of the normal tokens,
    ascending."""
    merges = [
        (token[:at], token[at:])
        for token in ids
        for at in range(len(token) - 1, 0, -1)  # those with a longer first part come first
        if token[:at] in ids and token[at:] in ids
    ]
    if not file.architecture.startswith("gemma"):
        scores = file.tokenizer("scores").tolist()
        merges.sort(key=lambda merge: -scores[ids["".join(merge)]])
    return merges


def _end_ids(file: GgufFile, tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of the tokens that end a response, ascending: those that keys name, and the special
    tokens among ENDS and SPECIAL_ENDS; NO_ENDS takes some of them out."""
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    ends = {special[token] for token in special.keys() & (ENDS | SPECIAL_ENDS)}
    for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"):
        ends.update(_token_named(file, name).values())
    return sorted(ends - {special.get(token) for token, others in NO_ENDS if others <= special.keys()})


def _templates(file: GgufFile) -> dict[str, str]:
    """Returns the chat templates by their keys; {} if there are none. If there is a TEMPLATE_FILE beside the
    GGUF file, it counts alone, by that name."""
    beside = file.path.with_name(TEMPLATE_FILE)
    if beside.exists():
        return {TEMPLATE_FILE: beside.read_text(encoding="utf-8")}
    # The list of their names begins like them.
    return {key: text for key, text in file.keys.items() if key.startswith(TEMPLATE) and type(text) is str}


def _write_templates(file: GgufFile, templates: dict[str, str], folder: Path) -> None:
    """Writes the default template to TEMPLATE_FILE, and one called tool_use also to a folder for additional
    ones. Without a default, that of tool_use counts; with neither, a template that raises an error is
    written."""
    reason = f"{file.path.name} has no default chat template, but {', '.join(templates)}"
    refusal = f"{{{{ raise_exception({json.dumps(shortened(reason))}) }}}}"
    default = templates.get(TEMPLATE_FILE) or templates.get(TEMPLATE) or templates.get(TOOL_USE) or refusal
    (folder / TEMPLATE_FILE).write_text(default, encoding="utf-8")
    if TOOL_USE in templates:
        additional = folder / "additional_chat_templates"
        additional.mkdir()
        (additional / "tool_use.jinja").write_text(templates[TOOL_USE], encoding="utf-8")
