"""The families of models that are supported on Neuron: a class for each.

transformers-neuronx's class for Llama serves them all: the others are read as a Llama that differs
(`base_family.py`). A new one is a class and a row of FAMILIES here, and a row of
tests/neuron_sim/test_families.py.

Source: transformers 4.57, models/*/configuration_*.py and modeling_*.py. Imports neither torch nor
transformers-neuronx.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from manifest import ORIGINAL_LENGTH, VISION_FIELDS, text_part, vision_family, vision_part
from models.checkpoint import rope
from models.checkpoint.rope import Rope
from models.errors import ModelError, named
from models.neuron.base_family import (
    ATTENTION,
    DOWN,
    GATE,
    MLP,
    UP,
    Arrange,
    DeltaNet,
    Experts,
    Family,
    GetTensor,
    K,
    LayerKind,
    Mamba2,
    O,
    Q,
    ShortConvolution,
    Tensors,
    Tower,
    V,
    Windows,
    times,
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
    """Models of Llama's architecture, such as Code Llama."""

    is_llama = True


class Mistral(Family):
    """Mistral 7B and others: all layers have the `sliding_window` of config.json; null: none has one."""

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
        """As config.json names the types of layers; else the layers from `max_window_layers` on have the
        sliding window. None has it unless `use_sliding_window` is true."""
        c = self.config
        window = c["sliding_window"] if c.get("use_sliding_window") else None
        if types := c.get("layer_types"):
            return _windows(types, window)
        return [window if window and n >= c["max_window_layers"] else None for n in range(self.layers)]


def _windows(layer_types: list[str], window: int | None) -> Windows:
    """Returns the sliding window of each layer: `window` for the type "sliding_attention", None for
    others."""
    return [window if each == "sliding_attention" else None for each in layer_types]


def _patterned(family: Family) -> Windows:
    """Returns the sliding window of each layer. If config.json does not name the types of layers, the last of
    every n layers has full attention, where n is `sliding_window_pattern` of config.json or else `pattern` of
    the family: with n = 3, layers 0 and 1 have the window, layer 2 does not."""
    pattern = family.config.get("sliding_window_pattern") or family.pattern
    every = range(1, family.layers + 1)
    types = ["sliding_attention" if n % pattern else "full_attention" for n in every]
    return _windows(family.config.get("layer_types") or types, family.config["sliding_window"])


class Qwen3(Qwen2):
    """Qwen3: a Qwen2 with norms of queries and keys, without biases unless config.json has them."""

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

    def matrix(self, get: GetTensor, name: str) -> Tensor:
        if name in (O, DOWN):
            return super().matrix(get, name)
        if name in MLP:
            return get("mlp.gate_up_proj.weight").chunk(2)[MLP.index(name)]
        sizes = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        return get("self_attn.qkv_proj.weight").split(sizes)[ATTENTION.index(name)]


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
        """Layers that `no_rope_layers` of config.json marks with 0, else every `no_rope_layer_interval`-th
        one, have no positions. If `use_sliding_window` is true, the same layers have the sliding window,
        unless config.json names the types of layers."""
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


class Recurrent(Family):
    """A family with recurrent layers. `arrange` joins tensors by key head: a list of tensors that the value
    heads of a key head share, such as queries and keys, then tensors of value heads
    (`FamilyForSampling._arranged`)."""

    revision = 3
    module: ClassVar[str]  # the name of a recurrence in its layer
    rope_of_attention: int | None = 0

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        attention = LayerKind(self.rope_of_attention)
        recurrent = LayerKind(is_recurrent=True)
        types = self.config.get("layer_types") or self.default_types()
        return tuple(attention if each in ("attention", "full_attention") else recurrent for each in types)

    def default_types(self) -> list[str]:
        """Returns the types of layers where config.json does not name them."""
        return ["mamba"] * self.layers

    def channels(self, tensor: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns the channels of a convolution, for `arrange`: the list of queries and keys, and the
        values."""
        size = self.recurrence.key_heads * self.recurrence.key_dim
        *shared, values = tensor.split([size, size, len(tensor) - 2 * size])
        return shared, values

    def recurrent_layer(self, get: GetTensor, arrange: Arrange) -> Tensors:
        """Returns the matrices and norms of a recurrent layer under Llama's names. The queries' matrix has
        all projections; those of keys and values only fill their places."""
        projections = arrange(*self.projections(get))
        output = arrange([], get(f"{self.module}.out_proj.weight").T).T
        return self.layer(get, MLP) | {
            **dict.fromkeys((f"{Q}.weight", f"{K}.weight", f"{V}.weight"), projections),
            f"{O}.weight": times(output, self.residual_scale),
        }

    def recurrent_tensors(self, get: GetTensor, arrange: Arrange) -> Tensors:
        """Returns the tensors that `Recurrence.tensors` names: conv [kernel, channels], decay_rate and
        dt_bias [value heads], and others."""
        name = self.module
        return {
            "conv": arrange(*self.channels(get(f"{name}.conv1d.weight")[:, 0])).T,
            "decay_rate": -arrange([], get(f"{name}.A_log")).float().exp(),
            "dt_bias": arrange([], get(f"{name}.dt_bias")),
            "gated_norm": get(f"{name}.norm.weight"),
        }


class Qwen35(Recurrent):
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
    has_attention_gate = True
    norm = Gemma.norm
    module = "linear_attn"

    def __init__(self, config: Json):
        super().__init__(config)
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        key_heads, value_heads, *sizes = (self._number(f"linear_{name}") for name in names)
        self.recurrence = DeltaNet(key_heads, value_heads // key_heads, *sizes)

    def default_types(self) -> list[str]:
        interval = self.config["full_attention_interval"]
        return ["linear_attention" if n % interval else "full_attention" for n in range(1, self.layers + 1)]

    def matrix(self, get: GetTensor, name: str) -> Tensor:
        return self._queries(get, 0) if name == Q else super().matrix(get, name)

    def extra_tensors(self, get: GetTensor) -> Tensors:
        return super().extra_tensors(get) | {"attention_gate": self._queries(get, 1)}

    def _queries(self, get: GetTensor, part: int) -> Tensor:
        """Returns the matrix of queries (part 0), or of their gates (part 1), which take turns by head in the
        checkpoint."""
        by_head = get(f"{Q}.weight").unflatten(0, (self.heads, 2, self.head_dim))
        return by_head[:, part].flatten(0, 1)

    def projections(self, get: GetTensor) -> tuple[Any, ...]:
        channels, *others = (get(f"linear_attn.in_proj_{name}.weight") for name in ("qkv", "z", "b", "a"))
        return *self.channels(channels), *others


class Lfm2(Recurrent):
    """LFM2 and LFM2.5, dense: short convolutions, and attentions with norms of queries and keys."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "max_position_embeddings": 128000,
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    }
    supported_values: ClassVar = Family.supported_values | {"conv_bias": (False,)}
    renamed: ClassVar = {
        O: "self_attn.out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        GATE: "feed_forward.w1",
        UP: "feed_forward.w3",
        DOWN: "feed_forward.w2",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.norm": "model.embedding_norm",
    }
    head_norms = "each"
    module = "conv"

    def __init__(self, config: Json):
        """Reads two fields by their older names, too, which decide where a file has both: `block_ff_dim` and
        `tie_embedding`. With `block_auto_adjust_ff_dim` the MLP has two thirds of the given width. These are
        multiplied by `block_ffn_dim_multiplier` and rounded up to `block_multiple_of`, unless the multiplier
        is null. Raises ConfigError as `Family` does, and unless `conv_L_cache` and, where it is used,
        `block_multiple_of` are whole numbers of 1 or more."""
        c = self.defaults | config
        super().__init__(
            c
            | {
                "rms_norm_eps": c["norm_eps"],
                "intermediate_size": c.get("block_ff_dim", c["intermediate_size"]),
                "tie_word_embeddings": c.get("tie_embedding", c["tie_word_embeddings"]),
            }
        )
        if c["block_auto_adjust_ff_dim"]:
            self.intermediate = int(2 * self.intermediate / 3)
            if (multiplier := c["block_ffn_dim_multiplier"]) is not None:
                step = self._number("block_multiple_of")
                self.intermediate = -(-int(multiplier * self.intermediate) // step) * step
        kernel = self._number("conv_L_cache")
        self.recurrence = ShortConvolution(self.heads, 1, 0, self.hidden // self.heads, kernel)

    def default_types(self) -> list[str]:
        full = self.config.get("full_attn_idxs", range(self.layers))
        return ["full_attention" if n in full else "conv" for n in range(self.layers)]

    def projections(self, get: GetTensor) -> tuple[Any, ...]:
        before, behind, channels = get("conv.in_proj.weight").chunk(3)
        return [], channels, behind, before

    def recurrent_tensors(self, get: GetTensor, arrange: Arrange) -> Tensors:
        return {"conv": arrange([], get("conv.conv.weight")[:, 0]).T}


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


class TwoRopes(Family):
    """Layers with a sliding window have positions of their own, which are not scaled."""

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The positions of layers with full attention, scaled as config.json says, and those of layers with a
        sliding window."""
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


class Olmo2(Family):
    """Norms come after attention and MLP; those of queries and keys go over all heads."""

    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    head_norms = "all"
    norms = "after"


class Olmo3(TwoRopes, Olmo2):
    """Three of four layers have a sliding window, and positions that are not scaled."""

    defaults: ClassVar = Olmo2.defaults | {"sliding_window": 4096}
    supported_values: ClassVar = Olmo2.supported_values | TWO_ROPES
    pattern = 4
    windows = _patterned


class Mixture(Family):
    """A mixture of experts, of which all are computed."""

    sizes: ClassVar = ("num_experts", "moe_intermediate_size")  # how many experts, and the columns of one
    shared_size: str | None = None  # the columns of the MLP that all tokens have, as one or more experts

    def __init__(self, config: Json):
        """Sets `experts`, and `intermediate` to the columns of all experts together; an MLP that all tokens
        share is as many further experts as have its columns. Raises ConfigError as `Family` does, and for
        more experts a token than there are. A shared MLP that is no multiple of an expert is left to
        `check`, by a row in `supported_values` of this object."""
        super().__init__(config)
        count, columns, per_token = map(self._number, (*self.sizes, "num_experts_per_tok"))
        if per_token > count:
            raise ConfigError(
                f"config.json: num_experts_per_tok is {per_token} and there are {count} experts"
            )
        shared = 0
        if self.shared_size:
            shared = self._number(self.shared_size) // columns
            self.supported_values = self.supported_values | {self.shared_size: (shared * columns,)}
        is_normalized = bool(self.config["norm_topk_prob"])
        self.experts = Experts(count + shared, columns, per_token, is_normalized, shared)
        self.intermediate = self.experts.count * columns

    def matrix(self, get: GetTensor, name: str) -> Tensor:
        """Returns a matrix of a layer; of an MLP those of all experts side by side."""
        if name not in MLP:
            return super().matrix(get, name)
        import torch  # what calls this has it

        return torch.cat(self.matrices(get, name), dim=1 if name == DOWN else 0)

    def matrices(self, get: GetTensor, name: str) -> list[Tensor]:
        """Returns the matrix `name` of each expert, the routed ones first, then the shared ones together."""
        numbers = range(self.experts.routed)
        return [get(name.replace("mlp", f"mlp.experts.{number}") + ".weight") for number in numbers]

    def mlp_tensors(self, get: GetTensor) -> Tensors:
        """Returns the tensors of the experts of a layer beside their matrices: router [hidden, experts], of
        the routed experts, and of the shared ones if these have a gate; with biases also router_bias
        [experts], gate_bias and up_bias [experts * columns], down_bias [experts, hidden]."""
        return {"router": get("mlp.gate.weight").T}


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
    shared_size = "shared_expert_intermediate_size"
    has_shared_gate = True

    def matrices(self, get: GetTensor, name: str) -> list[Tensor]:
        shared = get(name.replace("mlp", "mlp.shared_expert") + ".weight")
        try:
            of_all = get("mlp.experts.down_proj" if name == DOWN else "mlp.experts.gate_up_proj")
        except ModelError:  # Qwen3.5 is published with all experts in one tensor, in FP8 with each by itself
            return [*super().matrices(get, name), shared]
        if name != DOWN:
            of_all = of_all.chunk(2, 1)[MLP.index(name)]
        return [*of_all, shared]

    def mlp_tensors(self, get: GetTensor) -> Tensors:
        import torch  # what calls this has it

        shared = get("mlp.shared_expert_gate.weight").expand(self.experts.shared, -1)
        return {"router": torch.cat([get("mlp.gate.weight"), shared]).T}


class Qwen3Next(Qwen35Moe):
    """Qwen3-Next-80B-A3B: projections of its gated delta nets are joined by key head."""

    defaults: ClassVar = Qwen35Moe.defaults | {"num_experts": 512, "num_experts_per_tok": 10}
    supported_values = Qwen3Moe.supported_values

    def projections(self, get: GetTensor) -> tuple[Any, ...]:
        net = self.recurrence
        fused = (get(f"linear_attn.in_proj_{name}.weight") for name in ("qkvz", "ba"))
        first, second = (each.unflatten(0, (net.key_heads, -1)) for each in fused)
        parts = *first.split([net.key_dim, net.key_dim, net.values, net.values], 1), *second.chunk(2, 1)
        queries, keys, *others = (part.flatten(0, 1) for part in parts)
        return [queries, keys], *others


class GraniteHybrid(Mixture, Recurrent, Granite):
    """Granite 4: Mamba 2 and attentions, or attentions alone, with experts or without."""

    defaults: ClassVar = Granite.defaults | {
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }
    supported_values: ClassVar = Family.supported_values | {
        "mamba_conv_bias": (True,),
        "mamba_proj_bias": (False,),
        "time_step_limit": (
            [0.0, math.inf],
            [0.0, {"__float__": "Infinity"}],
        ),  # transformers 5 writes the last
    }
    renamed: ClassVar = {"mlp.gate": "block_sparse_moe.router.layer"}
    sizes = ("num_local_experts", "intermediate_size")
    shared_size = "shared_intermediate_size"
    module = "mamba"

    def __init__(self, config: Json):
        """A model has no experts if `num_local_experts` is 0; its attentions have positions if
        `position_embedding_type` is "rope". Raises ConfigError as `Mixture` and `Family` do, and for
        numbers of Mamba 2 that are missing or below 1."""
        has_experts = config.get("num_local_experts") != 0
        (Mixture if has_experts else Granite).__init__(self, config)
        if not has_experts:
            self.intermediate = self._number("shared_intermediate_size")
        names = ("n_groups", "n_heads", "d_state", "d_conv", "expand")
        groups, heads, d_state, d_conv, expand = (self._number(f"mamba_{name}") for name in names)
        self.recurrence = Mamba2(groups, heads // groups, d_state, expand * self.hidden // heads, d_conv)
        if self.config.get("position_embedding_type") != "rope":
            self.rope_of_attention = None

    def matrices(self, get: GetTensor, name: str) -> list[Tensor]:
        source = "output_linear.weight" if name == DOWN else "input_linear.weight"
        found = [get(f"shared_mlp.{source}")]
        if self.experts:
            found = [*get(f"block_sparse_moe.{source}"), *found]
        return found if name == DOWN else [each.chunk(2)[MLP.index(name)] for each in found]

    def projections(self, get: GetTensor) -> tuple[Any, ...]:
        net = self.recurrence
        sizes = [net.key_heads * size for size in (net.values, net.channels, net.group)]
        gate, channels, steps = get("mamba.in_proj.weight").split(sizes)
        return *self.channels(channels), gate, steps

    def channels(self, tensor: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns the channels of a convolution, for `arrange`: the list of queries and keys, and the values.
        In the checkpoint the order is values, keys, queries."""
        size = self.recurrence.key_heads * self.recurrence.key_dim
        values, keys, queries = tensor.split([len(tensor) - 2 * size, size, size])
        return [queries, keys], values

    def recurrent_tensors(self, get: GetTensor, arrange: Arrange) -> Tensors:
        return super().recurrent_tensors(get, arrange) | {
            "conv_bias": arrange(*self.channels(get("mamba.conv1d.bias"))),
            "skip": arrange([], get("mamba.D")),
            "gated_norm": arrange([], get("mamba.norm.weight")),
        }


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
    """Mixtral: a Mistral whose MLPs are experts."""

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
    renamed: ClassVar = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


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
    renamed: ClassVar = {"mlp.gate": "mlp.router"}
    has_expert_biases = True
    has_sinks = True
    swiglu_limit = 7.0
    pattern = 2
    windows = _patterned

    def matrix(self, get: GetTensor, name: str) -> Tensor:
        """Returns a matrix of a layer; of an MLP those of all experts side by side. In the checkpoint gate
        and up take turns in [experts, hidden, 2 * columns]; down is [experts, columns, hidden]."""
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
    renamed: ClassVar = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        O: "attention.wo",
        GATE: "feed_forward.w1",
        UP: "feed_forward.w3",
        DOWN: "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    biases = ()

    def matrix(self, get: GetTensor, name: str) -> Tensor:
        if name not in (Q, K, V):
            return super().matrix(get, name)
        by_head = get("attention.wqkv.weight").view(self.kv_heads, -1, self.head_dim, self.hidden)
        parts = by_head.split([self.heads // self.kv_heads, 1, 1], dim=1)
        return parts[ATTENTION.index(name)].reshape(-1, self.hidden)


FAMILIES: dict[str, type[Family]] = {
    "llama": Llama,
    "code_llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "qwen3_5_text": Qwen35,
    "lfm2": Lfm2,
    "granitemoehybrid": GraniteHybrid,
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
    """Returns the config.json of a model's text part, if a vision-language model is served on Neuron: its
    `text_config`, as if that were a file of its own, with the dtype of the whole if that names one. Any other
    config.json is returned as it is, the same object."""
    is_served = text_part(config_json).get("model_type") in TEXT_ALONE
    if not (is_served or vision_family(config_json).on_neuron):
        return config_json
    dtypes = {name: config_json[name] for name in ("torch_dtype", "dtype") if config_json.get(name)}
    return {**text_part(config_json), **dtypes}


def _tower(config_json: Json, width: int) -> Tower | None:
    """Returns the vision tower of a config.json; None for a model whose images are not read on Neuron, or
    whose vision part lacks one of VISION_FIELDS. width: of the embeddings that it makes. Its sizes are
    estimates."""
    vision = vision_part(config_json)
    if not vision_family(config_json).on_neuron or not vision.keys() >= {*VISION_FIELDS}:
        return None
    hidden = vision["hidden_size"]
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    matrices = 3 if vision.get("model_type") == "pixtral" else 2  # of an MLP
    layer = 4 * hidden * hidden + matrices * hidden * vision["intermediate_size"]
    layers = vision["num_hidden_layers"]
    return Tower(
        parameters=layers * layer + hidden * width + width * width,
        tile_flops=layers * (2 * patches * layer + 4 * patches * patches * hidden),
    )


def of(config_json: Json) -> Family:
    """Returns the family of a model by its config.json, which transformers 4 or 5 wrote; of a vision-language
    model that of its text part, with its `tower`.

    Raises ConfigError for an unsupported `model_type`, for fields that are missing, have a wrong type or
    contradict each other, and for a list of layers that has not `num_hidden_layers`. Raises ModelError for a
    value that is not supported, as `check` and `legacy_config` do.
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
        family.tower = _tower(config_json, family.hidden)
        family.check()
        kinds, _ropes = family.kinds, family.ropes  # read config.json, too
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"config.json of this {model_type} model cannot be understood: {named(error)}"
        ) from None
    if kinds and len(kinds) != family.layers:
        raise ConfigError(
            f"config.json describes {len(kinds)} layers and num_hidden_layers is {family.layers}"
        )
    return family
