"""The families of models that are served on Neuron: a class for each.

transformers-neuronx has classes for Llama and Mixtral only. A family's class reads its config.json, gives the
tensors of a layer under Llama's names, and says what its layers compute beyond Llama's (`Graph`), which
`neuron_graph.py` builds. Weights are rewritten as they are read; nothing on disk is. A new family is a class
and a row of FAMILIES here, and a row of tests/neuron_sim/test_families.py.

Source: transformers 4.57, models/*/configuration_*.py and modeling_*.py. Imports neither torch nor the
library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from config import DTYPES
from models import rope
from models.base import ModelError
from models.checkpoint import legacy_config
from models.rope import Rope
from run import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Q, K, V, O = ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]  # noqa: E741
GATE, UP, DOWN = MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
NORM_BEFORE_ATTENTION = "input_layernorm.weight"
NORM_BEFORE_MLP = "post_attention_layernorm.weight"  # Llama's name: it follows the attention

NOT_ANY_MORE = ("gpt2", "opt", "bloom", "gpt_neox")


@dataclass(frozen=True)
class LayerKind:
    rope: int | None = 0  # which of the rotary positions; None: the layer has none
    window: int | None = None  # a token attends to so many, itself included; None: to all before it


@dataclass(frozen=True)
class Graph:
    """What layers compute beyond Llama's."""

    ropes: tuple[Rope, ...] = ()  # empty: the library's
    kinds: tuple[LayerKind, ...] = ()  # of the layers; empty: all have the first rope and no window
    head_norms: str | None = None  # of queries and keys: "each" over each head, "all" over all heads together
    norms: str = "before"  # attention and MLP, "after" them, or "both"
    activation: str = "silu"  # by the library's name
    attention_cap: float | None = None  # scores become cap * tanh(score / cap)
    logit_cap: float | None = None

    @property
    def has_own_layers(self) -> bool:
        """The library's layer does not do."""
        return self != Graph(ropes=self.ropes)


class Family:
    """Llama, and Mistral without a window."""

    defaults: ClassVar[dict[str, Any]] = {}  # transformers', of fields that a config.json may leave out
    # Fields of config.json and the values that are computed, whatever config.json says. A field that is
    # missing or null has transformers' default, which is among them.
    computed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu", "swish"),
        "mlp_bias": (False,),
        "rope_scaling": (*rope.OF_THE_LIBRARY, *rope.SCALED),
        "quantization_config": ("none",),
    }
    # Programs of another revision are not loaded: counts up when a change here changes what is computed.
    revision = 1
    experts = 0
    norms_per_layer = 2  # vectors of hidden_size
    query_scale = residual_scale = embedding_scale = head_scale = 1.0

    def __init__(self, config: Mapping[str, Any]):
        """`config` has the names of transformers 4. Raises ConfigError for numbers that are missing or
        contradict, ModelError for a value that is not computed."""
        self.config = c = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, **self.defaults, **config}
        self.model_type = c["model_type"]
        self.layers = self._number("num_hidden_layers")
        self.hidden = self._number("hidden_size")
        self.heads = self._number("num_attention_heads")
        self.kv_heads = self._number("num_key_value_heads", self.heads)
        self.intermediate = self._number("intermediate_size")
        self.vocab = self._number("vocab_size")
        self.length = self._number("max_position_embeddings", 2048)
        if self.heads % self.kv_heads or (c.get("head_dim") is None and self.hidden % self.heads):
            sizes = f"hidden_size {self.hidden}, {self.heads} attention heads and {self.kv_heads}"
            raise ConfigError(f"config.json: {sizes} key-value heads do not divide each other")
        self.head_dim = self._number("head_dim", self.hidden // self.heads)
        self.is_tied = bool(c.get("tie_word_embeddings", False))
        self.dtype = DTYPES.get(str(c.get("torch_dtype")), "float32")
        if rope.kind(c) == "longrope":
            self.length = min(self.length, rope.original_length(c))

    def _number(self, name: str, default: int | None = None) -> int:
        value = default if self.config.get(name) is None else self.config[name]
        if type(value) is not int or value < 1:
            raise ConfigError(f"config.json: {name} is {value!r} and should be a positive whole number")
        return value

    def check(self) -> None:
        """Raises ModelError for a value of config.json that would not be computed, with the field and what
        is."""
        found = dict(self.config, rope_scaling=rope.kind(self.config))
        if quantization := self.config.get("quantization_config"):
            found["quantization_config"] = quantization.get("quant_method", "unknown")
        for name, computed in self.computed.items():
            if found.get(name) in (None, {}, *computed):
                continue
            values = " or ".join(map(str, computed))
            raise ModelError(
                f"config.json: {name} is {found[name]} and is computed as {values} for {self.model_type} "
                "models on Neuron, so the text would be wrong; serve this model on another device"
            )

    @property
    def library_class(self) -> str | None:
        """The name of the library's class that serves this model as it is; None: neuron_graph.py extends the
        one for Llama."""
        is_llama = (
            type(self) in (Family, Mistral)
            and self.graph() == Graph()
            and not self.biases
            and self.head_dim * self.heads == self.hidden
        )
        return "LlamaForSampling" if is_llama else None

    @property
    def name(self) -> str:
        """Of what the programs of this model are compiled from."""
        return self.library_class or f"{self.model_type}, revision {self.revision}"

    @property
    def options(self) -> dict[str, Any]:
        """Of the library's NeuronConfig."""
        return {"attention_layout": "BSH", "fuse_qkv": True}

    def as_llama(self) -> dict[str, Any]:
        """The config.json of a Llama of these sizes, for the library."""
        c = self.config
        return {
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": c.get("max_position_embeddings"),
            "rms_norm_eps": c["rms_norm_eps"],
            "rope_theta": c["rope_theta"],
            "rope_scaling": c.get("rope_scaling") if rope.kind(c) == "llama3" else None,
            "rotary_percentage": c.get("partial_rotary_factor") or 1.0,
            "bos_token_id": c.get("bos_token_id"),
            "eos_token_id": c.get("eos_token_id"),
        }

    def graph(self) -> Graph:
        own = rope.scaled(self.config, self._rotated)
        return Graph(ropes=(own,) if own else (), kinds=self.kinds())

    @property
    def _rotated(self) -> int:
        """Values of a head that positions turn."""
        return int(self.head_dim * (self.config.get("partial_rotary_factor") or 1.0))

    def kinds(self) -> tuple[LayerKind, ...]:
        """Of the layers, where they have windows or differ; else empty."""
        windows = self.windows()
        return tuple(LayerKind(0, window) for window in windows) if any(windows) else ()

    def windows(self) -> list[int | None]:
        """Of each layer."""
        return [None] * self.layers

    @property
    def biases(self) -> list[str]:
        """The projections of the attention that have one."""
        return ATTENTION if self.config.get("attention_bias") else []

    @property
    def vectors(self) -> int:
        """Values of a layer that are no matrix: norms and biases."""
        of_heads = self.heads * self.head_dim
        of_kv_heads = self.kv_heads * self.head_dim
        sizes = {Q: of_heads, K: of_kv_heads, V: of_kv_heads, O: self.hidden}
        norms = self.norms_per_layer * self.hidden
        heads = {None: 0, "each": 2 * self.head_dim, "all": of_heads + of_kv_heads}
        return norms + sum(sizes[name] for name in self.biases) + heads[self.graph().head_norms]

    # Tensors. `get` returns that of a name in the checkpoint, in a layer without the layer's prefix.

    def embedding(self, get: Callable[[str], Tensor]) -> Tensor:
        return _times(get("model.embed_tokens.weight"), self.embedding_scale)

    def head(self, get: Callable[[str], Tensor]) -> Tensor:
        name = "model.embed_tokens.weight" if self.is_tied else "lm_head.weight"
        return _times(get(name), self.head_scale)

    def final_norm(self, get: Callable[[str], Tensor]) -> Tensor:
        return self.norm(get("model.norm.weight"))

    def norm(self, weight: Tensor) -> Tensor:
        """What a norm multiplies by."""
        return weight

    def layer_prefix(self, number: int) -> str:
        return f"model.layers.{number}."

    def layer(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Matrices and norms of a layer under Llama's names."""
        matrices = {f"{name}.weight": get(f"{name}.weight") for name in (*ATTENTION, *MLP)}
        return self._scaled(matrices | self.norms_before(get))

    def norms_before(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        return {name: self.norm(get(name)) for name in (NORM_BEFORE_ATTENTION, NORM_BEFORE_MLP)}

    def beside(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """What a layer has and Llama's has not: biases by the names of the checkpoint, q_norm, k_norm,
        after_attention and after_mlp."""
        return self._scaled({f"{name}.bias": get(f"{name}.bias") for name in self.biases})

    def _scaled(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Multipliers of the model go into its matrices and biases."""
        scales = {Q: self.query_scale, O: self.residual_scale, DOWN: self.residual_scale}
        return {
            name: _times(tensor, scales.get(name.rpartition(".")[0], 1.0)) for name, tensor in tensors.items()
        }


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else (tensor.float() * factor).to(tensor.dtype)


class Mistral(Family):
    defaults: ClassVar = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}
    computed: ClassVar = Family.computed | {"attention_bias": (False,)}

    def windows(self) -> list[int | None]:
        return [self.config.get("sliding_window")] * self.layers


class Mixtral(Family):
    """By the library's own class, which scales no positions and whose sliding attention is wrong."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
    }
    computed: ClassVar = Family.computed | {"attention_bias": (False,), "rope_scaling": ("default",)}
    library_class = "MixtralForSampling"
    options: ClassVar = {}

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.experts = self._number("num_local_experts")
        self.length = min(self.length, self._number("sliding_window", self.length))
        if self.head_dim * self.heads != self.hidden:
            raise ConfigError(
                f"head_dim {self.head_dim} is not served on Neuron: transformers-neuronx takes "
                f"hidden_size / num_attention_heads, which is {self.hidden // self.heads} here"
            )


class Qwen2(Family):
    """Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen."""

    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    biases = (Q, K, V)

    def windows(self) -> list[int | None]:
        c = self.config
        window = c["sliding_window"] if c.get("use_sliding_window") else None
        if types := c.get("layer_types"):
            return _windows(types, window)
        return [window if n >= c["max_window_layers"] else None for n in range(self.layers)]


def _windows(layer_types: list[str], window: int | None) -> list[int | None]:
    return [window if each == "sliding_attention" else None for each in layer_types]


class Qwen3(Qwen2):
    defaults: ClassVar = Qwen2.defaults | {"head_dim": 128}
    biases = Family.biases

    def graph(self) -> Graph:
        return _with(super().graph(), head_norms="each")

    def beside(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        return super().beside(get) | self.head_norms(get)

    def head_norms(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        return {name: self.norm(get(f"self_attn.{name}.weight")) for name in ("q_norm", "k_norm")}


def _with(graph: Graph, **changes: Any) -> Graph:
    return Graph(**vars(graph) | changes)


class Phi3(Family):
    """Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini: projections that lie in one matrix are cut."""

    defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    computed: ClassVar = Family.computed | {"rope_scaling": ("default", "longrope")}
    biases = ()

    def windows(self) -> list[int | None]:
        return [self.config.get("sliding_window")] * self.layers

    def layer(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        of_heads, of_kv_heads = (count * self.head_dim for count in (self.heads, self.kv_heads))
        attention = get("self_attn.qkv_proj.weight").split([of_heads, of_kv_heads, of_kv_heads])
        mlp = get("mlp.gate_up_proj.weight").chunk(2)
        tensors = {f"{name}.weight": part for name, part in zip((Q, K, V, GATE, UP), (*attention, *mlp))}
        tensors |= {f"{name}.weight": get(f"{name}.weight") for name in (O, DOWN)}
        return tensors | self.norms_before(get)


class Granite(Family):
    """Granite 3: its multipliers go into weights."""

    defaults: ClassVar = {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    }

    def __init__(self, config: Mapping[str, Any]):
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
    computed: ClassVar = Family.computed | {"hidden_act": ("gelu_pytorch_tanh",)}

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.embedding_scale = math.sqrt(self.hidden)

    def graph(self) -> Graph:
        return _with(super().graph(), activation="gelu_new")

    def norm(self, weight: Tensor) -> Tensor:
        return weight.float() + 1


class Gemma2(Gemma):
    """Norms before and after; every second layer has a window; scores and logits are capped."""

    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
    # `hidden_act` stands in published files as well, and is not read.
    computed: ClassVar = Family.computed | {
        "hidden_act": ("gelu_pytorch_tanh", "gelu", "silu"),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False,),
    }
    norms_per_layer = 4
    pattern = 2  # of so many layers the last attends to all

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.query_scale = math.sqrt(self.head_dim / self.config["query_pre_attn_scalar"])

    def graph(self) -> Graph:
        return _with(
            super().graph(),
            norms="both",
            attention_cap=self.config.get("attn_logit_softcapping"),
            logit_cap=self.config.get("final_logit_softcapping"),
        )

    def windows(self) -> list[int | None]:
        pattern = self.config.get("sliding_window_pattern") or self.pattern
        every = range(1, self.layers + 1)
        types = ["sliding_attention" if n % pattern else "full_attention" for n in every]
        return _windows(self.config.get("layer_types") or types, self.config["sliding_window"])

    def norms_before(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        return {
            NORM_BEFORE_ATTENTION: self.norm(get("input_layernorm.weight")),
            NORM_BEFORE_MLP: self.norm(get("pre_feedforward_layernorm.weight")),
        }

    def beside(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        return super().beside(get) | _norms_after(self, get)


def _norms_after(family: Family, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
    return {
        "after_attention": family.norm(get("post_attention_layernorm.weight")),
        "after_mlp": family.norm(get("post_feedforward_layernorm.weight")),
    }


class Gemma3(Gemma2):
    """Queries and keys have norms; layers with a window have rotary positions of their own."""

    defaults: ClassVar = Gemma2.defaults | {
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }
    pattern = 6

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.query_norm_scale = self.query_scale  # the norm would undo it in the matrix
        self.query_scale = 1.0

    def graph(self) -> Graph:
        c = self.config
        everywhere = rope.scaled(c, self.head_dim) or rope.plain(c["rope_theta"], self.head_dim)
        near = rope.plain(c["rope_local_base_freq"], self.head_dim)
        kinds = tuple(LayerKind(1 if window else 0, window) for window in self.windows())
        return _with(super().graph(), ropes=(everywhere, near), kinds=kinds, head_norms="each")

    def beside(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        norms = {name: self.norm(get(f"self_attn.{name}.weight")) for name in ("q_norm", "k_norm")}
        norms["q_norm"] = norms["q_norm"] * self.query_norm_scale
        return super().beside(get) | norms


class Olmo2(Family):
    """Norms come after attention and MLP; those of queries and keys go over all heads."""

    defaults: ClassVar = {"rms_norm_eps": 1e-5}

    def graph(self) -> Graph:
        return _with(super().graph(), head_norms="all", norms="after")

    def norms_before(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        # The library's layer wants them; they are not computed.
        unused = get("post_attention_layernorm.weight")
        return {NORM_BEFORE_ATTENTION: unused, NORM_BEFORE_MLP: unused}

    def beside(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        norms = {name: get(f"self_attn.{name}.weight") for name in ("q_norm", "k_norm")}
        return super().beside(get) | norms | _norms_after(self, get)


class InternLM2(Family):
    """InternLM2 and 2.5: a matrix holds the queries, the key and the value of each key-value head."""

    computed: ClassVar = Family.computed | {"bias": (False,)}
    names: ClassVar = {
        O: "attention.wo",
        GATE: "feed_forward.w1",
        UP: "feed_forward.w3",
        DOWN: "feed_forward.w2",
    }
    biases = ()

    def embedding(self, get: Callable[[str], Tensor]) -> Tensor:
        return get("model.tok_embeddings.weight")

    def head(self, get: Callable[[str], Tensor]) -> Tensor:
        return get("model.tok_embeddings.weight" if self.is_tied else "output.weight")

    def layer(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        fused = get("attention.wqkv.weight")
        by_head = fused.view(self.kv_heads, -1, self.head_dim, self.hidden)
        parts = by_head.split([self.heads // self.kv_heads, 1, 1], dim=1)
        tensors = {f"{name}.weight": part.reshape(-1, self.hidden) for name, part in zip((Q, K, V), parts)}
        tensors |= {f"{name}.weight": get(f"{theirs}.weight") for name, theirs in self.names.items()}
        tensors[NORM_BEFORE_ATTENTION] = get("attention_norm.weight")
        tensors[NORM_BEFORE_MLP] = get("ffn_norm.weight")
        return tensors


FAMILIES: dict[str, type[Family]] = {
    "llama": Family,
    "code_llama": Family,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "phi3": Phi3,
    "granite": Granite,
    "smollm3": SmolLM3,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "olmo2": Olmo2,
    "internlm2": InternLM2,
}


def of(config_json: Mapping[str, Any]) -> Family:
    """The family of a model by its config.json, which transformers 4 or 5 wrote.

    Raises ConfigError for a family that is not served on Neuron, and as Family does.
    """
    model_type = config_json.get("model_type")
    if model_type in NOT_ANY_MORE:
        raise ConfigError(
            f"{model_type} models are not served on Neuron any more; "
            "give a model of Llama's architecture, or try --device cpu"
        )
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"model_type {model_type!r} is not served on Neuron; these are: {known}")
    return FAMILIES[model_type](legacy_config(config_json))
