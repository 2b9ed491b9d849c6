"""The settings of a model, checked when they are made, as far as the library checks them."""

from __future__ import annotations

import enum

from transformers_neuronx.constants import GQA, Layout

NEURON_CONFIG = {
    "sparse_attn": None,
    "quant": None,
    "kv_cache_quant": None,
    "continuous_batching": None,
    "attention_layout": Layout.HSB,
    "collectives_layout": Layout.HSB,
    "cache_layout": Layout.SBH,
    "padding_side": "left",
    "group_query_attention": None,
    "sequence_parallel_norm": False,
    "sequence_parallel_norm_threshold": 2048,
    "bf16_rms_norm": False,
    "on_device_embedding": False,
    "on_device_generation": None,
    "all_reduce_dtype": None,
    "cast_logits_dtype": "float32",
    "fuse_qkv": False,
    "qkv_tiling": False,
    "weight_tiling": False,
    "mlp_in_weight_tiling_permute_order": (1, 2, 0, 3),
    "mlp_out_weight_tiling_permute_order": (1, 2, 0, 3),
    "log_softmax_scores": False,
    "shard_over_sequence": False,
    "output_all_logits": False,
    "attn_output_transposed": False,
    "fused_rmsnorm_qkv": False,
    "fused_rmsnorm_mlp": False,
    "mlp_out_weight_transpose": False,
    "fuse_mlp": False,
    "is_eagle_target": False,
    "is_eagle_draft": False,
    "has_pre_attention_norm": True,
    "compilation_worker_count": None,
    "duplicate_q_weight_sos": False,
}
# They change what forward() returns, or how it is called; a server has no use for them.
NOT_SIMULATED = (
    "sparse_attn",
    "log_softmax_scores",
    "shard_over_sequence",
    "output_all_logits",
    "is_eagle_target",
    "is_eagle_draft",
)


def _require(fact: bool, told: str) -> None:
    if not fact:
        raise AssertionError(told)


class NeuronConfig:
    def __init__(self, **settings):
        unknown = sorted(settings.keys() - NEURON_CONFIG.keys())
        _require(not unknown, f"NeuronConfig has no {unknown}")
        self.__dict__.update(NEURON_CONFIG | settings)
        logits = ("float32", "float16", "bfloat16")
        _require(self.cast_logits_dtype in logits, f"cast_logits_dtype is one of {logits}")
        _require(self.padding_side in ("left", "right"), "padding_side is left or right")
        _require(self.sequence_parallel_norm_threshold > 0, "sequence_parallel_norm_threshold is above 0")
        _require(self.fuse_qkv or not self.qkv_tiling, "qkv_tiling needs fuse_qkv")
        if self.continuous_batching:
            self.padding_side = "right"
        if self.group_query_attention is not None:
            self.group_query_attention = GQA(self.group_query_attention)
        for name in NOT_SIMULATED:
            if settings.get(name):
                raise NotImplementedError(f"the fake does not simulate NeuronConfig({name}=...)")

    @property
    def lhs_aligned(self) -> bool:
        return self.padding_side == "right"

    @property
    def use_2d_cache_ids(self) -> bool:
        return self.lhs_aligned

    def to_json(self) -> dict:
        return _plain(self)


def _plain(value):
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in vars(value).items()} if hasattr(value, "__dict__") else value


class ContinuousBatchingConfig:
    def __init__(self, **settings):
        name = "max_num_seqs" if settings.get("max_num_seqs") is not None else "batch_size_for_shared_caches"
        self.max_num_seqs = settings.pop(name)
        self.max_model_len = settings.pop("max_model_len", None)
        self.optimized_paged_attention = settings.pop("optimized_paged_attention", None) or False
        self.enable_chunked_prefill = settings.pop("enable_chunked_prefill", None) or False
        _require(self.optimized_paged_attention or not self.enable_chunked_prefill, "chunked prefill needs paged attention")
        _require(not settings, f"ContinuousBatchingConfig has no {sorted(settings)}")
        if self.optimized_paged_attention:
            raise NotImplementedError("the fake does not simulate paged attention")

    @property
    def batch_size_for_shared_caches(self) -> int:
        return self.max_num_seqs


class GenerationConfig:
    def __init__(
        self,
        *,
        max_length=None,
        do_sample=False,
        top_k=50,
        top_p=1.0,
        top_p_min_tokens=1,
        global_top_k=None,
        eos_token_id=None,
        temperature=1.0,
        dynamic=False,
        deterministic=False,
        per_batch_line=False,
    ):
        self.max_length = max_length
        self.do_sample = do_sample
        self.top_k = top_k
        self.top_p = _floats(top_p)
        self.top_p_min_tokens = top_p_min_tokens
        self.global_top_k = global_top_k
        self.eos_token_id = eos_token_id
        self.temperature = _floats(temperature)
        self.dynamic = dynamic
        self.deterministic = deterministic
        self.per_batch_line = per_batch_line

    def __eq__(self, other):
        return isinstance(other, GenerationConfig) and vars(self) == vars(other)


def _floats(value):
    return [float(item) for item in value] if isinstance(value, list) else float(value)


class QuantizationConfig:
    def __init__(
        self, quant_dtype="s8", dequant_dtype="f16", quantize_method="vector_dynamic", quantize_attn=True, no_quantize_list=()
    ):
        if quant_dtype not in ("s8", "f8e4m3fn"):
            raise NotImplementedError(f"quant_dtype={quant_dtype!r}")
        if quantize_method not in ("vector_dynamic", "direct_cast"):
            raise NotImplementedError(f"quantize_method={quantize_method!r}")
        self.quant_dtype = quant_dtype
        self.dequant_dtype = dequant_dtype
        self.quantize_method = quantize_method
        self.quantize_attn = quantize_attn
        self.no_quantize_list = list(no_quantize_list)


class KVCacheQuantizationConfig:
    def __init__(self, quant_dtype="s8", dequant_dtype="bf16", quantize_method="direct_cast"):
        if quant_dtype not in ("s8", "f16", "bf16", "f8e4m3fn"):
            raise NotImplementedError(f"quant_dtype={quant_dtype!r}")
        if quantize_method != "direct_cast":
            raise NotImplementedError(f"quantize_method={quantize_method!r}")
        self.quant_dtype = quant_dtype
        self.dequant_dtype = dequant_dtype
        self.quantize_method = quantize_method
