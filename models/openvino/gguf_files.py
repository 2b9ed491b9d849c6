"""Which GGUF files OpenVINO computes right.

Its GGUF frontend ignores keys and tensors that it does not know, so all architectures, keys and tensors that
are read right (`gguf.py`) are listed here; any other file is dequantized (checkpoint/gguf.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from models.child import shortened
from models.gguf.container import TYPES, GgufFile
from models.gguf.keys import DIVISORS, KEYS, LONG_DIVISORS, SHORT_DIVISORS, head_size, keys_of_model

# Keys that are read right with these values alone.
VALUES_READ = {
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.type": ("none", "linear", "yarn"),
    "rope.scaling.yarn_attn_factor": (1.0,),
}
EXPERT_KEYS = {"expert_count", "expert_used_count"}
# Keys of one architecture that may have any number.
OWN_KEYS = {
    "phi3": {"attention.sliding_window", "rope.scaling.attn_factor"},
    "gemma3": {"attention.sliding_window", "rope.freq_base_swa"},
    "mistral3": {"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"},
    "olmoe": EXPERT_KEYS,
    "gpt-oss": {*EXPERT_KEYS, "attention.sliding_window", "expert_feed_forward_length"},
}
NEEDED_KEYS = (
    "attention.head_count attention.layer_norm_rms_epsilon block_count context_length embedding_length"
)
# The tensors of each layer.
ATTENTION = "attn_norm attn_q attn_k attn_v attn_output"
LAYER = f"{ATTENTION} ffn_norm ffn_gate ffn_up ffn_down"
EXPERTS = "ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"
BIASES = "attn_q.bias attn_k.bias attn_v.bias"
OTHER_BIASES = "attn_output.bias ffn_gate_inp.bias ffn_gate_exps.bias ffn_up_exps.bias ffn_down_exps.bias"
HEAD_NORMS = "attn_q_norm attn_k_norm"
ARCHITECTURES = {
    "llama": LAYER,
    "mistral3": LAYER,
    "qwen2": f"{LAYER} {BIASES}",
    "qwen3": f"{LAYER} {HEAD_NORMS}",
    "phi3": "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down",
    "gemma3": f"{LAYER} {HEAD_NORMS} post_attention_norm post_ffw_norm",
    "olmoe": f"{ATTENTION} {HEAD_NORMS} ffn_norm {EXPERTS}",
    "gpt-oss": f"{ATTENTION} attn_sinks post_attention_norm {EXPERTS} {BIASES} {OTHER_BIASES}",
}
OUTSIDE_LAYERS = {"token_embd.weight", "output_norm.weight"}  # the tensors of no layer
# Those of an architecture, which are no weights. The frontend uses none of them.
OWN_DIVISORS = {"llama": {DIVISORS}, "phi3": {SHORT_DIVISORS, LONG_DIVISORS}}
PLAIN_TYPES = {"F32", "F16", "BF16"}
READ_TYPES = {
    *PLAIN_TYPES,
    *["Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "MXFP4"],
}


def why_not(file: GgufFile) -> str | None:
    """Returns why a file is not computed as it is, as a part of a log line; None where it is. The reason is
    the first that was found."""
    reason = next(_obstacles(file), None)
    return reason and shortened(reason)


def _obstacles(file: GgufFile) -> Iterator[str]:
    """Yields each reason why OpenVINO would not compute the file right: an architecture that ARCHITECTURES
    lacks, a key that is not read or has another value, a key or a tensor that is missing, a tensor that is
    not known or has another type. A key whose value is 0 or false is no reason. Ends after an unknown
    architecture and after one of NEEDED_KEYS that is missing."""
    if file.architecture not in ARCHITECTURES:
        yield f"its architecture is {file.architecture}"
        return
    free = KEYS | OWN_KEYS.get(file.architecture, set())
    for name, value in keys_of_model(file).items():
        is_read = isinstance(value, (int, float)) and (name in free or not value)
        if not is_read and not (isinstance(value, (float, str)) and value in VALUES_READ.get(name, ())):
            yield f"`{file.architecture}.{name}` is {value}"
    for name in NEEDED_KEYS.split():
        if not file[name]:
            yield f"it has no `{name}`"
            return
    if file["attention.value_length"] not in (None, head_size(file)):
        yield "the sizes of its keys and values differ"
    if file.architecture != "phi3" and rotated_size(file) != head_size(file):
        yield "it rotates a part of each head"
    is_yarn = file["rope.scaling.type"] == "yarn"
    is_scaled = is_yarn or file["attention.temperature_scale"] or LONG_DIVISORS in file.tensors
    if is_scaled and not file["rope.scaling.original_context_length"]:
        yield "it has no `rope.scaling.original_context_length`"
    needed = OUTSIDE_LAYERS | _of_layers(file, ARCHITECTURES[file.architecture])
    for name in sorted(needed - file.tensors.keys()):
        yield f"it lacks the tensor {name}"
    known = needed | _of_layers(file, BIASES) | {"output.weight"} | OWN_DIVISORS.get(file.architecture, set())
    for name, tensor in file.tensors.items():
        kind = TYPES[tensor.type].name
        if name not in known:
            yield f"it has the tensor {name}"
        if kind not in READ_TYPES:
            yield f"{name} is in {kind}"


def _of_layers(file: GgufFile, names: str) -> set[str]:
    """Returns the names of tensors that all layers together have, if each has `names`, separated by spaces:
    "attn_q" stands for its weight. The number of layers is that of the file's key, but at most its number of
    tensors."""
    layers = min(file["block_count"], len(file.tensors))
    ends = [name if "." in name else f"{name}.weight" for name in names.split()]
    return {f"blk.{layer}.{end}" for layer in range(layers) for end in ends}


def rotated_size(file: GgufFile) -> int:
    """Returns how many values of each head are rotated."""
    return file["rope.dimension_count"] or head_size(file)


def compressed_types(file: GgufFile) -> str:
    """Returns the types of the file's compressed weights, sorted, such as "Q4_K, Q6_K"; "" where none is
    compressed."""
    kinds = {TYPES[tensor.type].name for tensor in file.tensors.values()}
    return ", ".join(sorted(kinds.difference(PLAIN_TYPES)))
