"""The families of models that are supported on Neuron: a class for each.

transformers-neuronx's class for Llama serves them all: the others are read as a Llama that differs
(`base_family.py`). A new one is a class and a row of FAMILIES here, and a row of
tests/neuron_sim/test_families.py.

Source: transformers 4.57, models/*/configuration_*.py and modeling_*.py. Imports neither torch nor
transformers-neuronx.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from manifest import ORIGINAL_LENGTH, text_part, vision_family
from models.checkpoint import rope
from models.checkpoint.rope import Rope
from models.errors import ModelError, named
from models.neuron.base_family import (
    DOWN,
    GATE,
    MLP,
    NORM_BEFORE_ATTENTION,
    NORM_BEFORE_MLP,
    UP,
    DeltaNet,
    Experts,
    Family,
    GetTensor,
    K,
    LayerKind,
    O,
    Q,
    Tensors,
    V,
    Windows,
)
from models.neuron.legacy_config import legacy_config
from run import ConfigError, Json

if TYPE_CHECKING:
    from torch import Tensor

NOT_ANY_MORE = ("gpt2", "opt", "bloom", "gpt_neox")
# Text parts of vision-language models whose images are not read on Neuron.
TEXT_ALONE = ("qwen3_5_text", "qwen3_5_moe_text")
# Where sliding-window layers have rotary positions of their own, all are computed here; only
# transformers-neuronx computes llama3.
TWO_ROPES = {"rope_scaling": ("default", *rope.SCALED)}


class Llama(Family):
    is_llama = True


class Mistral(Family):
    is_llama = True
    defaults: ClassVar = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}
    supported_values: ClassVar = Family.supported_values | {"attention_bias": (False,)}

    def windows(self) -> Windows:
        return [self.config.get("sliding_window")] * self.layers


class Qwen2(Family):
    """Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen."""

    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    biases = (Q, K, V)

    def windows(self) -> Windows:
        c = self.config
        window = c["sliding_window"] if c.get("use_sliding_window") else None
        if types := c.get("layer_types"):
            return _windows(types, window)
        return [window if n >= c["max_window_layers"] else None for n in range(self.layers)]


def _windows(layer_types: list[str], window: int | None) -> Windows:
    return [window if each == "sliding_attention" else None for each in layer_types]


def _patterned(family: Family) -> Windows:
    """Where config.json does not name the types, the last of every `pattern` layers has full attention."""
    pattern = family.config.get("sliding_window_pattern") or family.pattern
    every = range(1, family.layers + 1)
    types = ["sliding_attention" if n % pattern else "full_attention" for n in every]
    return _windows(family.config.get("layer_types") or types, family.config["sliding_window"])


class Qwen3(Qwen2):
    defaults: ClassVar = Qwen2.defaults | {"head_dim": 128}
    biases = Family.biases
    head_norms = "each"


class Phi3(Family):
    """Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini: fused projections are split."""

    defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    supported_values: ClassVar = Family.supported_values | {"rope_scaling": ("default", "longrope")}
    biases = ()
    windows = Mistral.windows

    def layer(self, get: GetTensor) -> Tensors:
        of_heads, of_kv_heads = (count * self.head_dim for count in (self.heads, self.kv_heads))
        attention = get("self_attn.qkv_proj.weight").split([of_heads, of_kv_heads, of_kv_heads])
        mlp = get("mlp.gate_up_proj.weight").chunk(2)
        split = {f"{name}.weight": part for name, part in zip((Q, K, V, GATE, UP), (*attention, *mlp))}
        return super().layer(get, (O, DOWN)) | split


class Granite(Family):
    """Granite 3: its multipliers go into weights."""

    defaults: ClassVar = {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    }

    def __init__(self, config: Json):
        super().__init__(config)
        self.embedding_scale = self.config["embedding_multiplier"]
        self.head_scale = 1 / self.config["logits_scaling"]
        self.residual_scale = self.config["residual_multiplier"]
        self.query_scale = self.config["attention_multiplier"] * math.sqrt(self.head_dim)


class SmolLM3(Family):
    """Some layers have no positions."""

    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    }

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        c = self.config
        every = range(1, self.layers + 1)
        turned = c.get("no_rope_layers") or [n % c["no_rope_layer_interval"] for n in every]
        window = c.get("sliding_window") if c.get("use_sliding_window") else None
        of_types = ["full_attention" if turns else "sliding_attention" for turns in turned]
        windows = _windows(c.get("layer_types") or of_types, window)
        return tuple(LayerKind(0 if turns else None, each) for turns, each in zip(turned, windows))


class Gemma(Family):
    """Norms multiply by 1 + weight; the embedding is scaled."""

    defaults: ClassVar = {
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    supported_values: ClassVar = Family.supported_values | {"hidden_act": ("gelu_pytorch_tanh",)}
    activation = "gelu_new"

    def __init__(self, config: Json):
        super().__init__(config)
        self.embedding_scale = math.sqrt(self.hidden)

    def norm(self, weight: Tensor) -> Tensor:
        return weight.float() + 1


class Qwen35(Family):
    """Qwen3.5 to 3.8, dense: gated delta nets, and in every fourth layer an attention with a gate."""

    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 32768,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    head_norms = "each"
    norm = Gemma.norm

    def __init__(self, config: Json):
        super().__init__(config)
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        key_heads, value_heads, *sizes = (self._number(f"linear_{name}") for name in names)
        self.delta_net = DeltaNet(key_heads, value_heads // key_heads, *sizes)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        interval = self.config["full_attention_interval"]
        patterned = [n % interval and "linear_attention" for n in range(1, self.layers + 1)]
        types = self.config.get("layer_types") or patterned
        return tuple(LayerKind(is_recurrent=each == "linear_attention") for each in types)

    def matrix(self, get: GetTensor, name: str) -> Tensor:
        return self._queries(get, 0) if name == Q else super().matrix(get, name)

    def extra_tensors(self, get: GetTensor) -> Tensors:
        return super().extra_tensors(get) | {"attention_gate": self._queries(get, 1)}

    def _queries(self, get: GetTensor, part: int) -> Tensor:
        """Queries and their gates take turns by head."""
        by_head = get(f"{Q}.weight").unflatten(0, (self.heads, 2, self.head_dim))
        return by_head[:, part].flatten(0, 1)

    def recurrent_layer(self, get: GetTensor) -> Tensors:
        matrices = dict.fromkeys((f"{name}.weight" for name in (Q, K, V)), self.projections(get))
        matrices[f"{O}.weight"] = get("linear_attn.out_proj.weight")
        return self.layer(get, MLP) | matrices

    def projections(self, get: GetTensor) -> Tensor:
        """The matrix of a gated delta net."""
        queries, *others = (get(f"linear_attn.in_proj_{name}.weight") for name in ("qkv", "z", "b", "a"))
        return self._by_key_head(*self._split(queries), *others)

    def recurrent_tensors(self, get: GetTensor) -> Tensors:
        return {
            "conv": self._by_key_head(*self._split(get("linear_attn.conv1d.weight")[:, 0])).T,
            "decay_rate": -get("linear_attn.A_log").float().exp(),
            "dt_bias": get("linear_attn.dt_bias"),
            "gated_norm": get("linear_attn.norm.weight"),
        }

    def _split(self, queries_keys_values: Tensor) -> tuple[Tensor, ...]:
        net = self.delta_net
        return queries_keys_values.split([net.key_heads * n for n in (net.key_dim, net.key_dim, net.values)])

    def _by_key_head(self, *parts: Tensor) -> Tensor:
        import torch  # what calls this has it

        by_head = [part.unflatten(0, (self.delta_net.key_heads, -1)) for part in parts]
        return torch.cat(by_head, 1).flatten(0, 1)


class Gemma2(Gemma):
    """Norms before and after; every second layer has a sliding window; scores and logits are capped."""

    defaults: ClassVar = Gemma.defaults | {
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
    # Published files also have `hidden_act`, which is not read.
    supported_values: ClassVar = Family.supported_values | {
        "hidden_act": ("gelu_pytorch_tanh", "gelu", "silu"),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False,),
    }
    norms = "both"
    pattern = 2
    windows = _patterned

    def __init__(self, config: Json):
        super().__init__(config)
        self.query_scale = math.sqrt(self.head_dim / self.config["query_pre_attn_scalar"])
        self.attention_cap = self.config["attn_logit_softcapping"]
        self.logit_cap = self.config["final_logit_softcapping"]

    def norms_before(self, get: GetTensor) -> Tensors:
        return {
            NORM_BEFORE_ATTENTION: self.norm(get("input_layernorm.weight")),
            NORM_BEFORE_MLP: self.norm(get("pre_feedforward_layernorm.weight")),
        }


class TwoRopes(Family):
    """Layers with a sliding window have positions of their own, which are not scaled."""

    @property
    def ropes(self) -> tuple[Rope, ...]:
        c = self.config
        size = self.head_dim
        everywhere = rope.scaled(self.rope, size) or rope.plain(self.rope["rope_theta"], size)
        # Files of transformers 5 name a base for each kind of layer, those of 4 one for all.
        return everywhere, rope.plain(c.get("rope_local_base_freq", c["rope_theta"]), size)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple(LayerKind(1 if window else 0, window) for window in self.windows())


class Gemma3(TwoRopes, Gemma2):
    """Queries and keys have norms; sliding-window layers have rotary positions of their own."""

    defaults: ClassVar = Gemma2.defaults | {
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }
    supported_values: ClassVar = Gemma2.supported_values | TWO_ROPES
    head_norms = "each"
    pattern = 6

    def __init__(self, config: Json):
        super().__init__(config)
        self.query_norm_scale = self.query_scale  # the norm would undo it in the matrix
        self.query_scale = 1.0

    def extra_tensors(self, get: GetTensor) -> Tensors:
        extra = super().extra_tensors(get)
        extra["q_norm"] *= self.query_norm_scale
        return extra


class Olmo2(Family):
    """Norms come after attention and MLP; those of queries and keys go over all heads."""

    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    head_norms = "all"
    norms = "after"

    def norms_before(self, get: GetTensor) -> Tensors:
        # The layer of transformers-neuronx needs them; they are not computed.
        unused = get("post_attention_layernorm.weight")
        return {NORM_BEFORE_ATTENTION: unused, NORM_BEFORE_MLP: unused}


class Olmo3(TwoRopes, Olmo2):
    """Three of four layers have a sliding window, and positions that are not scaled."""

    defaults: ClassVar = Olmo2.defaults | {"sliding_window": 4096}
    supported_values: ClassVar = Olmo2.supported_values | TWO_ROPES
    pattern = 4
    windows = _patterned


class Mixture(Family):
    """A mixture of experts, of which all are computed."""

    sizes: ClassVar = ("num_experts", "moe_intermediate_size")  # how many experts, and the columns of one
    routers = ("mlp.gate.weight",)  # those after the first are of shared experts
    expert = "mlp.experts.{}."
    names: ClassVar = {name: name.removeprefix("mlp.") for name in MLP}
    has_biases = False

    def __init__(self, config: Json):
        super().__init__(config)
        count, columns, per_token = map(self._number, (*self.sizes, "num_experts_per_tok"))
        if per_token > count:
            raise ConfigError(
                f"config.json: num_experts_per_tok is {per_token} and there are {count} experts"
            )
        is_normalized = bool(self.config["norm_topk_prob"])
        shared = len(self.routers) - 1
        self.experts = Experts(count + shared, columns, per_token, is_normalized, self.has_biases, shared)
        self.intermediate = self.experts.count * columns

    def matrix(self, get: GetTensor, name: str) -> Tensor:
        """For the matrix of an MLP those of all experts side by side."""
        if name not in self.names:
            return super().matrix(get, name)
        import torch  # what calls this has it

        return torch.cat(self.matrices(get, name), dim=1 if name == DOWN else 0)

    def matrices(self, get: GetTensor, name: str) -> list[Tensor]:
        """Of the experts, each by itself."""
        theirs = f"{self.expert}{self.names[name]}.weight"
        return [get(theirs.format(number)) for number in range(self.experts.count - self.experts.shared)]

    def mlp_tensors(self, get: GetTensor) -> Tensors:
        import torch  # what calls this has it

        return {"router": torch.cat([get(name) for name in self.routers]).T}


class Qwen3Moe(Mixture, Qwen3):
    """Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B."""

    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    }
    # Layers without experts are not supported.
    supported_values: ClassVar = Qwen3.supported_values | {
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    }

    def windows(self) -> Windows:
        c = self.config
        return [c["sliding_window"] if c.get("use_sliding_window") else None] * self.layers


class Qwen35Moe(Mixture, Qwen35):
    """Qwen3.5-35B-A3B and others: all tokens share the last expert."""

    defaults: ClassVar = Qwen35.defaults | {
        "num_key_value_heads": 2,
        "intermediate_size": 512,  # of no layer
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }
    supported_values: ClassVar = Qwen35.supported_values | {"norm_topk_prob": (True,)}
    routers = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")

    def __init__(self, config: Json):
        super().__init__(config)
        own = {"shared_expert_intermediate_size": (self.experts.columns,)}
        self.supported_values = self.supported_values | own

    def matrices(self, get: GetTensor, name: str) -> list[Tensor]:
        shared = get(f"mlp.shared_expert.{self.names[name]}.weight")
        try:
            of_all = get("mlp.experts.down_proj" if name == DOWN else "mlp.experts.gate_up_proj")
        except ModelError:  # Qwen3.5 is published with all experts in one tensor, in FP8 with each by itself
            return [*super().matrices(get, name), shared]
        if name != DOWN:
            of_all = of_all.chunk(2, 1)[MLP.index(name)]
        return [*of_all, shared]


class Qwen3Next(Qwen35Moe):
    """Qwen3-Next-80B-A3B: projections of its gated delta nets are joined by key head."""

    defaults: ClassVar = Qwen35Moe.defaults | {"num_experts": 512, "num_experts_per_tok": 10}
    supported_values = Qwen3Moe.supported_values

    def projections(self, get: GetTensor) -> Tensor:
        return self._by_key_head(*(get(f"linear_attn.in_proj_{name}.weight") for name in ("qkvz", "ba")))


class Olmoe(Mixture):
    """Norms of queries and keys go over all heads."""

    defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    }
    supported_values: ClassVar = Family.supported_values | {"clip_qkv": (None,)}
    sizes = ("num_experts", "intermediate_size")
    head_norms = "all"


class Mixtral(Mixture, Mistral):
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    sizes = ("num_local_experts", "intermediate_size")
    routers = ("block_sparse_moe.gate.weight",)
    expert = "block_sparse_moe.experts.{}."
    names: ClassVar = {GATE: "w1", UP: "w3", DOWN: "w2"}


class GptOss(Mixture):
    """gpt-oss-20b and 120b: sinks, sliding windows in every second layer, experts with biases."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, ORIGINAL_LENGTH: 4096},
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    }
    supported_values: ClassVar = Family.supported_values | {"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)}
    sizes = ("num_local_experts", "intermediate_size")
    routers = ("mlp.router.weight",)
    has_biases = True
    has_sinks = True
    swiglu_limit = 7.0
    pattern = 2
    windows = _patterned

    def matrix(self, get: GetTensor, name: str) -> Tensor:
        """Gate and up take turns in [experts, hidden, 2 * columns]; down is [experts, columns, hidden]."""
        if name not in MLP:
            return get(f"{name}.weight")
        if name == DOWN:
            return get("mlp.experts.down_proj").flatten(0, 1).T
        columns = get("mlp.experts.gate_up_proj")[..., MLP.index(name) :: 2]
        return columns.transpose(1, 2).flatten(0, 1)

    def extra_tensors(self, get: GetTensor) -> Tensors:
        return super().extra_tensors(get) | {"sinks": get("self_attn.sinks")}

    def mlp_tensors(self, get: GetTensor) -> Tensors:
        gate_and_up = get("mlp.experts.gate_up_proj_bias")
        return super().mlp_tensors(get) | {
            "router_bias": get("mlp.router.bias"),
            "gate_bias": gate_and_up[:, ::2].flatten(),
            "up_bias": gate_and_up[:, 1::2].flatten(),
            "down_bias": get("mlp.experts.down_proj_bias"),
        }


class InternLM2(Family):
    """InternLM2 and 2.5: a matrix holds the queries, the key and the value of each key-value head."""

    supported_values: ClassVar = Family.supported_values | {"bias": (False,)}
    names: ClassVar = {
        O: "attention.wo",
        GATE: "feed_forward.w1",
        UP: "feed_forward.w3",
        DOWN: "feed_forward.w2",
    }
    biases = ()
    embedding_name = "model.tok_embeddings.weight"
    head_name = "output.weight"

    def matrix(self, get: GetTensor, name: str) -> Tensor:
        if name in self.names:
            return get(f"{self.names[name]}.weight")
        by_head = get("attention.wqkv.weight").view(self.kv_heads, -1, self.head_dim, self.hidden)
        parts = by_head.split([self.heads // self.kv_heads, 1, 1], dim=1)
        return parts[(Q, K, V).index(name)].reshape(-1, self.hidden)

    def norms_before(self, get: GetTensor) -> Tensors:
        return {NORM_BEFORE_ATTENTION: get("attention_norm.weight"), NORM_BEFORE_MLP: get("ffn_norm.weight")}


FAMILIES: dict[str, type[Family]] = {
    "llama": Llama,
    "code_llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "qwen3_5_text": Qwen35,
    "qwen3_5_moe_text": Qwen35Moe,
    "qwen3_next": Qwen3Next,
    "phi3": Phi3,
    "granite": Granite,
    "smollm3": SmolLM3,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "olmo2": Olmo2,
    "olmo3": Olmo3,
    "olmoe": Olmoe,
    "gpt_oss": GptOss,
    "internlm2": InternLM2,
}


def text_config(config_json: Json) -> Json:
    """The config.json of a model's text part: of a vision-language model the `text_config`, as if it were a
    file of its own."""
    is_served = text_part(config_json).get("model_type") in TEXT_ALONE
    if not (is_served or vision_family(config_json).on_neuron):
        return config_json
    dtypes = {name: config_json[name] for name in ("torch_dtype", "dtype") if config_json.get(name)}
    return {**text_part(config_json), **dtypes}


def of(config_json: Json) -> Family:
    """The family of a model by its config.json, which transformers 4 or 5 wrote; of a vision-language model
    that of its text part.

    Raises ConfigError for an unsupported family or an invalid config.json, ModelError for an unsupported
    value.
    """
    text = text_config(config_json)
    model_type = text.get("model_type")
    if model_type in NOT_ANY_MORE:
        raise ConfigError(
            f"{model_type} models are no longer supported on Neuron; "
            "give a model of Llama's architecture, or try --device cpu"
        )
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"model_type {model_type!r} is not supported on Neuron; these are: {known}")
    try:
        family = FAMILIES[model_type](legacy_config(text))
        family.is_nested = text is not config_json
        family.check()
        kinds = family.graph().kinds
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"config.json of this {model_type} model cannot be understood: {named(error)}"
        ) from None
    if kinds and len(kinds) != family.layers:
        raise ConfigError(
            f"config.json describes {len(kinds)} layers and num_hidden_layers is {family.layers}"
        )
    return family
