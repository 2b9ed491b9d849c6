"""What a family of models is on Neuron: Llama's, from which the others differ.

`Family` reads a config.json, gives the tensors of a layer under Llama's names, and says what its layers
compute beyond Llama's (`BEYOND_LLAMA`), which `neuron/graph.py` builds. Weights are converted as they are
read; files stay as they are. Imports neither torch nor transformers-neuronx.

Source: transformers 4.57, models/llama.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from config import DTYPE_NAMES, DTYPES
from manifest import ORIGINAL_LENGTH, read_ropes
from models.checkpoint import rope
from models.checkpoint.rope import Rope
from models.errors import ModelError
from run import ConfigError, Json

if TYPE_CHECKING:
    from torch import Tensor

Q, K, V, O = ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]  # noqa: E741
GATE, UP, DOWN = MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# The names of the norms before attention and MLP: Llama's, and by `Family.norms` those of the checkpoint. A
# layer with norms "after" computes none of these, but transformers-neuronx needs some.
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
NORMS_BEFORE = {
    "before": LLAMA_NORMS,
    "both": ("input_layernorm", "pre_feedforward_layernorm"),
    "after": ("post_attention_layernorm", "post_attention_layernorm"),
}


GetTensor = Callable[[str], "Tensor"]  # a tensor of the checkpoint by its name
Arrange = Callable[..., "Tensor"]  # FamilyForSampling._arranged of neuron/graph.py
Tensors = dict[str, "Tensor"]
Windows = list[int | None]  # the sliding window of each layer


def padded_heads(heads: int, kv_heads: int, tp_degree: int) -> tuple[int, int]:
    """Returns how many query heads and cached key-value heads all cores have together, after padding and
    replication by transformers-neuronx. Both are multiples of `tp_degree`; `kv_heads` divides `heads`. 28
    heads with 4 key-value heads become 32 and 8 on 8 cores.

    Follows utils.py:325-391 and decoder.py:100-176,1762-1768 of transformers-neuronx with
    `group_query_attention=None`, its default.
    """
    padded = round_up(heads, tp_degree)
    if heads == kv_heads:
        return padded, padded
    if kv_heads % tp_degree == 0:  # whole key-value heads on each core
        return padded, kv_heads
    if tp_degree % kv_heads == 0 and (padded - heads) % kv_heads == 0:  # each head on several cores
        return padded, tp_degree
    if padded * kv_heads == heads * tp_degree:  # the padded query heads of a core share one head
        return padded, round_up(kv_heads, tp_degree)
    return padded, padded  # one for each query head


def round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


@dataclass(frozen=True)
class LayerKind:
    """Which positions and which window the attention of a layer has, or that the layer is recurrent."""

    rope: int | None = 0  # which of the rotary positions; None: the layer has none
    window: int | None = None  # sliding window in tokens, itself included; None: full attention
    is_recurrent: bool = False  # a recurrence in place of the attention


@dataclass(frozen=True)
class Recurrence:
    """A kind of recurrent layers. Their input matrix has, for each key head one after the other, the channels
    of the convolution, the gates of the values, and the further columns of each value head."""

    columns: ClassVar[int]
    # The tensors of a layer beside its matrices, and the dimension that is split over the cores; None: each
    # core has all.
    tensors: ClassVar[dict[str, int | None]]

    key_heads: int
    group: int  # value heads of each
    key_dim: int
    value_dim: int
    kernel: int  # of the convolution over queries, keys and values

    @property
    def values(self) -> int:
        """How many values all value heads of a key head have."""
        return self.group * self.value_dim

    @property
    def channels(self) -> int:
        """How many channels the convolution has for a key head."""
        return 2 * self.key_dim + self.values

    @property
    def width(self) -> int:
        """How many columns of the input matrix a key head has."""
        return self.channels + self.values + self.columns * self.group

    @property
    def state(self) -> tuple[int, int]:
        """The sizes of a key head's recurrent state: the key_dim of all its value heads, and value_dim."""
        return self.group * self.key_dim, self.value_dim

    def on_cores(self, tp_degree: int) -> Recurrence:
        """Returns the same recurrence with a number of key heads that `tp_degree` divides. If the key heads
        divide `tp_degree`, each is cut into parts, which have a part of its value heads each, filled up with
        value heads of zeros; else key heads of zeros are added.

        On 8 cores 4 key heads with 4 value heads each become 8 with 2 each; 6 key heads become 8, of which 2
        are zeros.
        """
        parts = tp_degree // self.key_heads if tp_degree % self.key_heads == 0 else 1
        heads = round_up(self.key_heads * parts, tp_degree)
        return replace(self, key_heads=heads, group=-(-self.group // parts))


class DeltaNet(Recurrence):
    """A gated delta net. Each value head has a beta and a decay."""

    columns = 2
    tensors: ClassVar = {"conv": 1, "decay_rate": 0, "dt_bias": 0, "gated_norm": None}

    @property
    def vectors(self) -> int:
        """Values of a layer beside its matrices."""
        return self.key_heads * (self.kernel * self.channels + 2 * self.group) + self.value_dim


class Mamba2(Recurrence):
    """A state space model. In the words of Recurrence its groups are key heads, B are keys and C queries, and
    its heads are value heads, each with a step."""

    columns = 1
    tensors: ClassVar = DeltaNet.tensors | {"conv_bias": 0, "skip": 0, "gated_norm": 0}

    @property
    def vectors(self) -> int:
        return self.key_heads * ((self.kernel + 1) * self.channels + 3 * self.group + self.values)


class ShortConvolution(Recurrence):
    """A short convolution with a gate before it and a gate behind it. The gate before it takes the place of
    the columns of value heads."""

    tensors: ClassVar = {"conv": 1}
    state = (1, 1)  # of no use: transformers-neuronx has two buffers

    @property
    def columns(self) -> int:
        return self.value_dim

    @property
    def vectors(self) -> int:
        return self.key_heads * self.kernel * self.channels


@dataclass(frozen=True)
class Experts:
    """The MLPs of a mixture of experts. All experts of a layer are side by side in one gate, one up and one
    down matrix, and all are computed."""

    count: int
    columns: int  # of one expert, in gate and up
    per_token: int
    is_normalized: bool  # the weights of a token's experts sum to one
    shared: int  # the last experts, which all tokens have

    @property
    def routed(self) -> int:
        return self.count - self.shared

    def pieces(self, tp_degree: int) -> int:
        """Into how many pieces each expert is cut, so that each core holds whole pieces only."""
        return tp_degree // math.gcd(self.count, tp_degree)

    def fits(self, tp_degree: int) -> bool:
        """Whether `tp_degree` cuts the columns of an expert into equal pieces."""
        return self.columns % self.pieces(tp_degree) == 0


@dataclass(frozen=True)
class Tower:
    """The vision tower of a model that reads images, which runs on the host in float32."""

    parameters: int  # with the projector
    tile_flops: int  # floating-point operations for a tile of the largest size


# The attributes of a Family that make its layers differ from Llama's.
BEYOND_LLAMA = (
    "head_norms",
    "norms",
    "activation",
    "attention_cap",
    "logit_cap",
    "has_sinks",
    "swiglu_limit",
    "experts",
    "recurrence",
    "has_attention_gate",
)


class Family:
    """What Llama is, unless a subclass says otherwise."""

    defaults: ClassVar[Json] = {}  # transformers', of fields that a config.json may leave out
    # Fields of config.json and the values that are supported. A field that is missing or null has
    # transformers' default, which is among them.
    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu", "swish"),
        "mlp_bias": (False,),
        "rope_scaling": (*rope.NEURONX_ROPE_TYPES, *rope.SCALED),
    }
    # Compiled graphs of another revision are not loaded: raise it with any change of what is computed.
    revision = 2
    # It is the text part of a vision-language model, whose checkpoint names its tensors otherwise.
    is_nested = False
    tower: Tower | None = None  # of a model that reads images
    is_llama = False  # true where it only differs in a graph, biases or head_dim of its own
    # What layers compute beyond Llama's, with `ropes` and `kinds`.
    head_norms: str | None = None  # of queries and keys: "each" over each head, "all" over all heads together
    norms = "before"  # attention and MLP, "after" them, or "both"
    activation = "silu"  # its name in transformers-neuronx
    attention_cap: float | None = None  # scores become cap * tanh(score / cap)
    logit_cap: float | None = None
    has_sinks = False  # each head's softmax has one more logit, of a value of zeros
    swiglu_limit: float | None = None  # of gate and up; None: the activation of the gate times up
    experts: Experts | None = None  # None: a dense model
    has_expert_biases = False  # of the router and of each expert's gate, up and down
    has_shared_gate = False  # the weight of shared experts is the sigmoid of their logit, else 1
    recurrence: Recurrence | None = None  # of the recurrent layers
    has_attention_gate = False  # each head's context is gated by the sigmoid of a projection
    renamed: ClassVar[dict[str, str]] = {}  # parts of Llama's names → what the checkpoint has instead
    query_scale = residual_scale = embedding_scale = head_scale = 1.0

    def __init__(self, config: Json):
        """`config` is a config.json with the names of transformers 4; it stays as it is. Raises ConfigError
        for numbers that are missing, no whole numbers of 1 or more, or contradict each other. Other damage
        raises KeyError and the like, which `families.of` reports. Unsupported values are left to `check`."""
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
            raise ConfigError(
                f"config.json: hidden_size {self.hidden}, {self.heads} attention heads and {self.kv_heads} "
                "key-value heads do not divide each other"
            )
        self.head_dim = self._number("head_dim", self.hidden // self.heads)
        self.is_tied = bool(c.get("tie_word_embeddings", False))
        self.dtype = DTYPE_NAMES.get(str(c.get("torch_dtype")), "float32")
        if self.rope["rope_type"] == "longrope":
            self.length = min(self.length, self.rope[ORIGINAL_LENGTH])

    @property
    def rope(self) -> Json:
        """The rotary positions of the first or only kind of layers, with the names of transformers 5."""
        return read_ropes(self.config)[0]

    def _number(self, name: str, default: int | None = None) -> int:
        """Returns a field of config.json, or `default` if it is missing or null. Raises ConfigError unless
        that is a whole number of 1 or more."""
        value = default if self.config.get(name) is None else self.config[name]
        if type(value) is not int or value < 1:
            raise ConfigError(f"config.json: {name} is {value!r} and should be a positive whole number")
        return value

    def check(self) -> None:
        """Raises ModelError for the first value of config.json that is not among `supported_values`, with the
        field and the supported values. A field that is missing, null or {} passes."""
        found = dict(self.config, rope_scaling=self.rope["rope_type"])
        for name, supported_values in self.supported_values.items():
            if found.get(name) in (None, {}, *supported_values):
                continue
            values = " or ".join(map(str, supported_values))
            raise ModelError(
                f"config.json: {name} is {found[name]} and this server supports {values} for "
                f"{self.model_type} models on Neuron, so the output would be wrong; "
                "serve this model on another device"
            )

    @property
    def name(self) -> str:
        """What the graphs of this model are compiled from: the graph of the family, with its revision, or
        that of transformers-neuronx's class for Llama, which other models share."""
        differs = self.has_own_layers or self.ropes or self.biases
        if self.is_llama and not differs and self.head_dim * self.heads == self.hidden:
            return "LlamaForSampling"
        return f"{self.model_type}, revision {self.revision}"

    def as_llama(self) -> Json:
        """Returns the config.json of a Llama of these sizes, for transformers-neuronx."""
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
            "rope_scaling": c.get("rope_scaling") if self.rope["rope_type"] == "llama3" else None,
            "rotary_percentage": c.get("partial_rotary_factor") or 1.0,
            "bos_token_id": c.get("bos_token_id"),
            "eos_token_id": c.get("eos_token_id"),
        }

    @property
    def has_own_layers(self) -> bool:
        """Whether neuron/graph.py builds the layers, not transformers-neuronx."""
        return bool(self.kinds) or any(getattr(self, name) != getattr(Family, name) for name in BEYOND_LLAMA)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary positions that `graph.py` computes, by the numbers of `LayerKind.rope`; empty: those of
        transformers-neuronx."""
        rotated = int(self.head_dim * (self.config.get("partial_rotary_factor") or 1.0))  # values of a head
        own = rope.scaled(self.rope, rotated)
        return (own,) if own else ()

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, where layers have sliding windows or differ; empty: all have the first rope
        and no window."""
        windows = self.windows()
        return tuple(LayerKind(0, window) for window in windows) if any(windows) else ()

    def windows(self) -> Windows:
        """Returns the sliding window of each layer in tokens; None: the layer has full attention."""
        return [None] * self.layers

    @property
    def biases(self) -> list[str]:
        """The projections of the attention that have a bias."""
        return ATTENTION if self.config.get("attention_bias") else []

    @functools.cached_property
    def recurrent_layers(self) -> set[int]:
        """The numbers of the recurrent layers. Where there are any, the class is a `Recurrent` of
        `families.py`."""
        return {number for number, kind in enumerate(self.kinds) if kind.is_recurrent}

    def served_in(self, dtype: str) -> str:
        """Returns the dtype that `--dtype` means for this checkpoint: auto is its own."""
        return self.dtype if dtype == "auto" else dtype

    @property
    def parameters(self) -> int:
        """How many parameters the model has, without its vision tower. Tied tables count once."""
        tables = 1 if self.is_tied else 2
        layers = self.matrix_parameters(tp_degree=1) + self.vectors
        return layers + self.hidden * (tables * self.vocab + 1)  # 1: the last norm

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory during loading: the checkpoint, the table of embeddings in float32, which
        transformers-neuronx makes, and the vision tower in float32."""
        tower = 4 * self.tower.parameters if self.tower else 0
        return self.parameters * DTYPES[self.dtype].bytes + 4 * self.hidden * self.vocab + tower

    def matrix_parameters(self, tp_degree: int) -> int:
        """Returns how many parameters the attention, recurrence and MLP matrices of all layers have on all
        cores, padded for `tp_degree`."""
        heads, kv_heads = padded_heads(self.heads, self.kv_heads, tp_degree)
        gates = heads if self.has_attention_gate else 0
        columns = self.attention_layers * self.head_dim * (2 * (heads + kv_heads) + gates)
        if net := self.recurrence and self.recurrence.on_cores(tp_degree):
            columns += len(self.recurrent_layers) * net.key_heads * (net.width + net.values)
        columns += self.layers * 3 * round_up(self.intermediate, tp_degree)
        return self.hidden * columns

    def state_bytes(self, tp_degree: int, dtype: str) -> int:
        """Bytes of the recurrent states of a slot, with the last inputs of their convolutions, on all cores;
        0 without recurrent layers. dtype: as `--dtype` has it."""
        if not self.recurrence:
            return 0
        net = self.recurrence.on_cores(tp_degree)
        state = math.prod(net.state) * DTYPES["float32"].bytes
        conv = (net.kernel - 1) * net.channels * DTYPES[self.served_in(dtype)].bytes
        return len(self.recurrent_layers) * net.key_heads * (state + conv)

    @property
    def vectors(self) -> int:
        """How many values of the layers are in norms, biases, routers and convolutions: few, and counted as
        if all were copied to every core."""
        of_heads = self.heads * self.head_dim
        of_kv_heads = self.kv_heads * self.head_dim
        sizes = {Q: of_heads, K: of_kv_heads, V: of_kv_heads, O: self.hidden}
        norms = (4 if self.norms == "both" else 2) * self.hidden
        heads = {None: 0, "each": 2 * self.head_dim, "all": of_heads + of_kv_heads}
        router = 0
        if experts := self.experts:
            router = self.hidden * (experts.count if self.has_shared_gate else experts.routed)
            if self.has_expert_biases:
                router += experts.count * (1 + 2 * experts.columns + self.hidden)
        sinks = self.heads if self.has_sinks else 0
        biases = sum(sizes[name] for name in self.biases)
        of_attention = self.attention_layers * (biases + sinks + heads[self.head_norms])
        recurrent = len(self.recurrent_layers) * self.recurrence.vectors if self.recurrence else 0
        return self.layers * (norms + router) + of_attention + recurrent

    @property
    def attention_layers(self) -> int:
        return self.layers - len(self.recurrent_layers)

    # Tensors. In a layer their names are without the layer's prefix.

    def embedding(self, get: GetTensor) -> Tensor:
        """Returns the table of embeddings [vocab, hidden], times `embedding_scale`."""
        return times(get(EMBEDDING), self.embedding_scale)

    def head(self, get: GetTensor) -> Tensor:
        """Returns the output matrix [vocab, hidden], times `head_scale`; of tied tables that is the table of
        embeddings."""
        return times(get(EMBEDDING if self.is_tied else HEAD), self.head_scale)

    def norm(self, weight: Tensor) -> Tensor:
        """Returns what a norm multiplies by. weight: as the checkpoint has it."""
        return weight

    def layer(self, get: GetTensor, names: Sequence[str] = (*ATTENTION, *MLP)) -> Tensors:
        """Returns the matrices of a layer that `names` lists, and its two norms, under Llama's names, with
        the multipliers of the model in them. get: returns a tensor of the layer by its name in the layer, and
        raises ModelError for one that is missing. The methods below take it, too."""
        matrices = {f"{name}.weight": self.matrix(get, name) for name in names}
        norms = zip(LLAMA_NORMS, NORMS_BEFORE[self.norms])
        before = {f"{name}.weight": self.norm(get(f"{theirs}.weight")) for name, theirs in norms}
        return self._scaled(matrices | before)

    def matrix(self, get: GetTensor, name: str) -> Tensor:
        """Returns a matrix of a layer by Llama's name, which is given without `.weight`: [outputs,
        inputs]."""
        return get(f"{name}.weight")

    def extra_tensors(self, get: GetTensor) -> Tensors:
        """Returns the tensors of a layer with an attention that Llama's lacks, where the family has them:
        biases by the names of the checkpoint, q_norm, k_norm, after_attention and after_mlp; sinks [heads];
        attention_gate [heads * head_dim, hidden]."""
        extra = self._scaled({f"{name}.bias": get(f"{name}.bias") for name in self.biases})
        if self.head_norms:
            extra |= {name: self.norm(get(f"self_attn.{name}.weight")) for name in ("q_norm", "k_norm")}
            extra["q_norm"] = times(extra["q_norm"], self.query_scale)
        if self.norms != "before":
            extra["after_attention"] = self.norm(get("post_attention_layernorm.weight"))
            extra["after_mlp"] = self.norm(get("post_feedforward_layernorm.weight"))
        return extra

    def _scaled(self, tensors: Tensors) -> Tensors:
        """Returns the matrices and biases of a layer with the multipliers of the model in them; other tensors
        as they are. A norm of the queries would undo that of their matrix, and has it itself."""
        query_scale = 1.0 if self.head_norms else self.query_scale
        scales = {Q: query_scale, O: self.residual_scale, DOWN: self.residual_scale}
        return {
            name: times(tensor, scales.get(name.rpartition(".")[0], 1.0)) for name, tensor in tensors.items()
        }


def times(tensor: Tensor, factor: float) -> Tensor:
    """Returns the tensor times `factor`, multiplied in float32, in its own dtype; for 1 the tensor itself."""
    return tensor if factor == 1.0 else (tensor.float() * factor).to(tensor.dtype)
