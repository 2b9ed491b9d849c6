"""transformers-neuronx's class for Llama, extended: to other families (`families.py`), and to graphs that
return ids and logits.

Parts of transformers-neuronx are replaced while it builds or loads: its config (a head_dim of its own), its
graph (`Hlo`), a layer's list of weights (biases and norms, for which it has places that its class for Llama
leaves empty), and what a compiled graph returns. Its files stay as they are.

Source: transformers-neuronx 0.13.322, llama/model.py, llama/hlo.py, decoder.py, module.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers_neuronx import decoder, hlo, parallel, utils
from transformers_neuronx.activations import sigmoid
from transformers_neuronx.layers import attention, rotary
from transformers_neuronx.llama import hlo as llama_hlo
from transformers_neuronx.llama import model as llama

from manifest import SPLIT_WEIGHTS, read_json
from models.adapters import common_name
from models.checkpoint.rope import Rope
from models.errors import ModelError
from models.neuron.artifact import CompiledConfig
from models.neuron.base_family import HEAD, Family, GetTensor, K, LayerKind, O, Q, Tensors, V
from models.neuron.recurrent import Array, Rows, norm_of_all_cores, recurrent_layer

# The functions of transformers-neuronx that are replaced below.
LlamaConfig = llama.LlamaConfig
interleave_qkv = decoder.interleave_qkv
multiply = hlo.multiply
to_fp8 = hlo.quantize_kv_cache_direct_cast
from_fp8 = hlo.dequantize_kv_cache_direct_cast

FP8_MAX = 240.0  # the largest value of the device's e4m3; torch's and XLA's goes on to 448

# The weights that transformers-neuronx hands to a layer, in its order.
LAYER_WEIGHTS = [
    *("pre_attn_ln_weight", "pre_attn_ln_bias"),
    *(f"attn_{name}_{part}" for name in ("q", "k", "v", "out") for part in ("weight", "scales", "bias")),
    *("post_attn_ln_weight", "post_attn_ln_bias", "pre_mlp_ln_weight", "pre_mlp_ln_bias"),
    *(f"mlp_{name}_{part}" for name in ("in", "out") for part in ("weight", "scales", "bias")),
    *("post_mlp_ln_weight", "post_mlp_ln_bias"),
    *(f"{name}_{part}" for name in ("in0", "in1", "out") for part in ("weight", "scales")),
]
OF_ATTENTION = [name for name in LAYER_WEIGHTS if name.startswith("attn_")]
# Where a layer of transformers-neuronx keeps the tensors of `Family.extra_tensors`.
PLACES = {
    **{f"{name}.bias": f"attn_{place}_bias" for name, place in zip((Q, K, V, O), ("q", "k", "v", "out"))},
    "after_attention": "post_attn_ln_weight",
    "after_mlp": "post_mlp_ln_weight",
}


@contextlib.contextmanager
def _replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """A context manager that gives a module or an object these attributes, and its own ones back at the end.
    All threads see them."""
    own = {name: getattr(owner, name) for name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        vars(owner).update(own)


class FamilyForSampling(llama.LlamaForSampling):
    """The model of a family in transformers-neuronx. `from_pretrained` takes the arguments of `__init__`,
    and a folder in the place of its `config`."""

    # Of the next call, where layers have recurrent states, the last three numbers of Rows; `last_token_id` is
    # that of a whole prompt in any model.
    states: Sequence[Sequence[int]]

    def __init__(self, config: Any, family: Family, compiled_config: CompiledConfig, **options: Any):
        """Builds the model without its weights: with the family's config and graph in the place of Llama's.
        config, options: those of LlamaForSampling."""
        self._family = family
        # Each run returns ids or logits, as `return_token_ids` says; the device computes both.
        self._is_hybrid = compiled_config.sampling == "hybrid"
        self._snapshots = compiled_config.snapshots
        with (
            _replaced(llama, LlamaConfig=functools.partial(_config, family)),
            _replaced(llama, LlamaForSamplingNoEmbeddingHlo=functools.partial(Hlo, family)),
            _replaced(decoder, DecoderLmHeadForSamplingNoEmbedding=HybridDecoder),
        ):
            super().__init__(config, **options)

    def return_token_ids(self, ids: bool) -> None:
        """Makes every graph copy ids, or logits if `ids` is false, to the host from now on. Only for graphs
        that have both, and after `to_neuron`."""
        for each in self.nbs_objs:  # the decoders of all graphs
            each.program.returns_ids = ids

    def to_neuron(self) -> None:
        """Reads the weights, and puts the model onto the device; compiles the graphs if none were loaded. A
        run returns either ids or logits from then on, also where graphs give both. Raises ModelError for a
        tensor that is missing, other errors as transformers-neuronx raises them."""
        super().to_neuron()
        # From here on, a run returns one output.
        self.neuron_config.log_softmax_scores = False

    def _forward(self, *arguments: Any) -> torch.Tensor:
        """Returns what transformers-neuronx does: logits, or ids if the device samples. Where graphs give
        both, logits are [slots, vocabulary], after the last token."""
        output = super()._forward(*arguments)
        return self._logits(output)[:, -1] if self._gives_logits else output

    def speculative_forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Returns logits [tokens, vocabulary, slots] after each token, or what transformers-neuronx returns
        if the device samples."""
        output = super().speculative_forward(*arguments, **options)
        # As transformers-neuronx returns them: [tokens, vocabulary, slots].
        return self._logits(output).permute(1, 2, 0) if self._gives_logits else output

    def _preprocess(self, ids: torch.Tensor, **options: Any) -> tuple[Any, ...]:
        """Returns the inputs of a graph as transformers-neuronx does, but pads prompts alone. Where layers
        have recurrent states, the numbers of `states` are in the place of the inputs after the first three.
        """
        padded, positions, *others = super()._preprocess(ids, **options)
        if positions[0, 0] > 0:
            # Several tokens after others are padded with the last position, for which the longest graph runs.
            count = ids.shape[1]
            padded, positions = padded[:, :count], positions[:, :count]
        if self._family.recurrent_layers:
            others[1:] = (torch.tensor(each, dtype=torch.int32) for each in self.states)
        return padded, positions, *others

    @property
    def _gives_logits(self) -> bool:
        """Whether a run returns logits, which transformers-neuronx takes for ids."""
        return self._is_hybrid and not self.decoder_lm_head.program.returns_ids

    def _logits(self, output: torch.Tensor) -> torch.Tensor:
        """Returns logits of [padded vocabulary, tokens, slots] as [slots, tokens, vocabulary]."""
        return self._cast_logits(output)[: self.config.vocab_size].permute(2, 1, 0)

    def load_state_dict_dir(self, folder: str) -> None:
        """Makes each module read its tensors from the checkpoint in `folder` when transformers-neuronx asks
        for them; they are dropped afterwards. Reads no tensor itself. If the two configs of a vision-language
        model disagree, the checkpoint says whether tables are tied. Raises ModelError for a folder without
        weights."""
        family = self._family
        checkpoint = CheckpointTensors(Path(folder), family.renamed)
        if family.is_nested:  # its two configs may say different things
            family = copy.copy(family)
            family.is_tied = HEAD not in checkpoint
        model = self.chkpt_model
        self._checkpoint = checkpoint

        _fill_later(model.model.embed_tokens, lambda: {"weight": family.embedding(checkpoint).float()})
        for number, layer in enumerate(model.model.layers):
            get = checkpoint.in_layer(number)
            read = functools.partial(family.layer, get)
            if number in family.recurrent_layers:
                read = functools.partial(family.recurrent_layer, get, self._arranged)
            _fill_later(layer, read)
        _fill_later(model.model.norm, lambda: {"weight": family.norm(checkpoint("model.norm.weight"))})
        _fill_later(model.lm_head, lambda: {"weight": family.head(checkpoint)})

    def load_weights(self) -> None:
        """Reads the weights, layer by layer, and gives them to transformers-neuronx for the device, with the
        tensors that Llama's layers lack. Raises ModelError for a tensor that is missing."""
        new_layer = self.decoder_lm_head.new_layer

        def extended(**options: Any) -> Any:
            layer = new_layer(**options)
            layer.to_neuron = functools.partial(self._add_extra_tensors, layer, layer.to_neuron)
            return layer

        changed = {"DecoderParameterBuilder": ParameterBuilder, "interleave_qkv": _interleave_qkv}
        if self._is_hybrid:
            changed["DecoderProgramFullyUnrolled"] = HybridProgram
        with (
            _replaced(decoder, **changed),
            _replaced(parallel, ParallelTensorManipulator=Manipulator),
            _replaced(self.decoder_lm_head, new_layer=extended),
        ):
            super().load_weights()

    def _add_extra_tensors(self, layer: Any, to_neuron: Callable[[], None]) -> None:
        """Gives a layer of transformers-neuronx the tensors that Llama's lacks, then calls its `to_neuron`.
        Those that PLACES names go there, the others behind LAYER_WEIGHTS, as `_added_parameters` lists them.
        Raises ModelError for a tensor that is missing."""
        family = self._family
        get = self._checkpoint.in_layer(layer.layer_num)
        is_recurrent = layer.layer_num in family.recurrent_layers
        extra = self._make_recurrent(layer, get) if is_recurrent else family.extra_tensors(get)
        dtype = self.chkpt_model.lm_head.weight.dtype
        for name, tensor in extra.items():
            if name in PLACES:
                setattr(layer, PLACES[name], tensor.to(dtype) if name.endswith("bias") else tensor.float())
        if family.experts:
            extra |= family.mlp_tensors(get)
            pieces = family.experts.pieces(self.config.tp_degree)
            extra["expert_of"] = torch.eye(family.experts.count).repeat_interleave(pieces, dim=1)
        if "sinks" in extra:
            extra["sinks"] = self._of_padded_heads(extra["sinks"][:, None])
        if "attention_gate" in extra:
            by_head = extra["attention_gate"].unflatten(0, (-1, family.head_dim))
            extra["attention_gate"] = self._of_padded_heads(by_head).T
        for name, sharding in _added_parameters(family, is_recurrent).items():
            its_dtype = dtype if name == "attention_gate" else torch.float32
            layer.add_parameter(extra[name].to(its_dtype), sharding=sharding)
        to_neuron()

    def _make_recurrent(self, layer: Any, get: GetTensor) -> Tensors:
        """Gives a layer the buffers of a recurrence, in the places of those of an attention: the last inputs
        of the convolution in the model's dtype, the states in float32, for each slot and then for each
        snapshot. They are made when transformers-neuronx makes its caches. Drops the layer's matrices of keys
        and values, and turns off padding of heads and `fuse_qkv` for it. Returns the tensors of the layer
        beside its matrices, by the names of `Recurrence.tensors`. Raises ModelError for a tensor that is
        missing."""
        tp_degree = self.config.tp_degree
        net = self._family.recurrence.on_cores(tp_degree)
        layer.attn_k_weight = layer.attn_v_weight = None
        # Without what transformers-neuronx does to the heads of an attention.
        layer.allow_pad = False
        layer.neuron_config = copy.copy(layer.neuron_config)
        layer.neuron_config.fuse_qkv = False
        dtype = self.chkpt_model.lm_head.weight.dtype

        def init_caches() -> None:
            (slots,) = layer.batch_sizes
            rows = slots + self._snapshots
            conv = torch.zeros(rows, net.kernel - 1, net.key_heads * net.channels, dtype=dtype)
            height, width = net.state
            state = torch.zeros(rows, net.key_heads * height, width)
            manipulator = decoder.MaybeParallelTensorManipulator(tp_degree, layer._cpu_compile)
            layer.attn_k_cache[slots] = manipulator.shard_along(conv, dim=2)
            layer.attn_v_cache[slots] = manipulator.shard_along(state, dim=1)
            layer.cache_shape[slots] = None

        layer.init_caches = init_caches
        return self._family.recurrent_tensors(get, self._arranged)

    def _arranged(self, shared: Sequence[torch.Tensor], *own: torch.Tensor) -> torch.Tensor:
        """Returns tensors of the recurrence joined by key head, for the key heads that the cores have
        (`Recurrence.on_cores`): [key heads * sizes, ...].

        Each key head gets its part of each tensor of `shared`, which its value heads share, such as queries
        and keys, then the parts of its value heads of each tensor of `own`. If the cores cut a key head, each
        piece has all of the shared parts and some of the value heads. Heads that are added are zeros.

        shared: [key heads * size, ...]. own: [value heads * size, ...], those of a key head side by side.
        """
        net = self._family.recurrence
        on_cores = net.on_cores(self.config.tp_degree)
        pieces = -(-net.group // on_cores.group)
        parts = [part.unflatten(0, (net.key_heads, -1)).repeat_interleave(pieces, 0) for part in shared]
        for part in own:
            by_head = part.unflatten(0, (net.key_heads, net.group, -1))
            by_head = utils.pad(by_head, 1, pieces * on_cores.group)
            parts.append(by_head.unflatten(1, (pieces, -1)).flatten(0, 1).flatten(1, 2))
        return utils.pad(torch.cat(parts, 1), 0, on_cores.key_heads).flatten(0, 1)

    def _of_padded_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values of heads [heads, size, ...] as [heads * size, ...], with zeros where
        transformers-neuronx adds heads: after those of each key-value head where several cores share it, else
        after all."""
        heads = self.config.num_attention_heads
        kv_heads = self.config.num_key_value_heads
        added = -heads % self.config.tp_degree
        is_shared = heads != kv_heads and self.config.tp_degree % kv_heads == 0 and added % kv_heads == 0
        groups = kv_heads if is_shared else 1
        padded = utils.pad_interleaved(values, 0, heads + added, heads // groups, added // groups)
        return padded.flatten(0, 1)


def _added_parameters(family: Family, is_recurrent: bool) -> dict[str, int | None]:
    """Returns the names of what a layer has after LAYER_WEIGHTS, in this order, each with the dimension that
    is split over the cores; None: each core has all."""
    added = {}
    if is_recurrent:
        added |= family.recurrence.tensors
    elif family.has_attention_gate:
        added["attention_gate"] = 1
    if family.head_norms and not is_recurrent:
        added |= dict.fromkeys(("q_norm", "k_norm"), 0 if family.head_norms == "all" else None)
    if family.experts:
        # `expert_of` [experts, pieces] has a 1 where a piece belongs to an expert.
        added |= {"router": None, "expert_of": 1}
    if family.has_expert_biases:
        added |= {"router_bias": None, "gate_bias": 0, "up_bias": 0, "down_bias": None}
    if family.has_sinks:
        added["sinks"] = 0
    return added


def _is_state(cache: Any) -> bool:
    """Whether a cache is a recurrent state, which has no positions by which transformers-neuronx could cut
    it. Without a device a cache is a list."""
    return len((cache[0] if isinstance(cache, list) else cache).shape) == 3


class ParameterBuilder(decoder.DecoderParameterBuilder):
    """As its base class, but a recurrent state, which has no positions, is not cut."""

    def from_tensor(self, tensor: Any, dim_size: Any = None) -> Any:
        return super().from_tensor(tensor, None if dim_size and _is_state(tensor) else dim_size)


class Manipulator(parallel.ParallelTensorManipulator):
    """As its base class, but a recurrent state, which has no positions, is not cut."""

    def slice_on_nc(self, tensor: Any, *place: int, **options: int) -> Any:
        return tensor if _is_state(tensor) else super().slice_on_nc(tensor, *place, **options)


class HybridDecoder(decoder.DecoderLmHeadForSamplingNoEmbedding):
    """The decoder whose graphs return ids and logits if `log_softmax_scores` is set, in the place of what
    transformers-neuronx returns then."""

    post_layer_builder = None  # transformers-neuronx passes it on

    def _hlo_generation(self, logits: Any, *arguments: Any, **options: Any) -> Any:
        """Returns the ids, as transformers-neuronx's, and keeps them for `_hlo_post_layer`."""
        self._ids = super()._hlo_generation(logits, *arguments, **options)
        return self._ids

    def _hlo_post_layer(self, logits: Any) -> tuple[Any, Any]:
        """Returns the outputs of the graph: the ids and the logits."""
        return self._ids, logits


class HybridProgram(decoder.DecoderProgramFullyUnrolled):
    """Copies to the host either the ids of one core, or the logits of all cores."""

    returns_ids = False

    def enable_executor(self) -> None:
        """Makes two executors for each graph: the first returns the logits, the second the ids."""
        for place, batch_size in enumerate(self.batch_sizes):
            ids, logits = self.logits_buffer[place]
            for length in self.n_positions_list:
                kernel, memory = self.kernels[length, batch_size], self.memories[length, batch_size]
                inputs = self.input_buffers[place]
                self.executors[length, batch_size] = [
                    kernel.build_executor(memory, [*inputs], [output]) for output in (logits, ids)
                ]

    def execute(self, bucket_id: int, batch_size: int, *inputs: Any, return_ranks: int = -1) -> Any:
        """Runs the graph of a position bucket. Returns the ids of one core or the logits of all cores, as
        `returns_ids` says; return_ranks has no effect."""
        executor = self.executors[self.n_positions_list[bucket_id], batch_size][self.returns_ids]
        return executor(inputs, 1 if self.returns_ids else -1)

    def maybe_logits_device_to_host(self, batch_size: int, return_ranks: int) -> torch.Tensor:
        """Copies the outputs of the last run to the host. Returns the ids of the first core, or logits with
        the padded vocabulary of all cores in the first dimension. return_ranks has no effect."""
        ids, logits = self.logits_buffer[self.batch_sizes.index(batch_size)]
        if not self.returns_ids:
            return self.manipulator.unshard_along(logits, dim=0)
        of_all_cores = self.manipulator.unshard_along(ids, dim=0)
        return of_all_cores[: len(of_all_cores) // self.tp_degree]


def _config(family: Family, *arguments: Any, **options: Any) -> Any:
    """Returns the config of transformers-neuronx for Llama, with the family's head_dim."""
    config = LlamaConfig(*arguments, **options)
    config.attention_head_size = family.head_dim
    return config


def _fill_later(module: torch.nn.Module, read: Callable[[], Tensors]) -> None:
    """Makes a module set its parameters to what `read` returns when transformers-neuronx asks for them;
    matrices get the dtype that transformers-neuronx gave them, norms float32. Other parameters stay. Reads
    nothing itself; what `read` raises is raised then."""

    def materialize() -> None:
        own = dict(module.named_parameters())
        filled = {name: tensor.to(own[name].dtype) for name, tensor in read().items()}
        module.load_state_dict(filled, strict=False, assign=True)

    module.materialize = materialize


def _interleave_qkv(q: Any, k: Any, v: Any, tp_degree: int, dim: int) -> torch.Tensor:
    """Joins queries, keys and values along their last dimension, whatever `dim` is. The function of
    transformers-neuronx fails for biases, [n], where queries and keys differ in number."""
    matrices = torch.atleast_2d(q, k, v)
    return interleave_qkv(*matrices, tp_degree, dim=1).squeeze(0)


class CheckpointTensors:
    """The tensors of a checkpoint. A call takes Llama's name, changed as `renamed` says, in any spelling:
    those of the text part of a vision-language model have another one. It raises ModelError for a tensor that
    is missing. `in` takes the name of the checkpoint, in any spelling."""

    def __init__(self, folder: Path, renamed: dict[str, str]):
        """Raises ModelError for a folder without weights of a model."""
        self._renamed = renamed
        self._tensors = {common_name(name): tensor for name, tensor in _map_tensors(folder).items()}
        if not self._tensors:
            raise ModelError(f"there is no model.safetensors in {folder}")

    def __contains__(self, name: str) -> bool:
        return common_name(name) in self._tensors

    def __call__(self, name: str) -> torch.Tensor:
        for ours, theirs in self._renamed.items():
            name = name.replace(ours, theirs)
        if name not in self:
            raise ModelError(f"the checkpoint has no tensor {name}")
        return self._tensors[common_name(name)]

    def in_layer(self, number: int) -> GetTensor:
        """Returns a function that returns a tensor of a layer by its name in the layer, and raises ModelError
        for one that is missing."""
        return lambda name: self(f"model.layers.{number}.{name}")


def _map_tensors(folder: Path) -> Tensors:
    """Returns the tensors of a checkpoint by their names, in files that are mapped and not read; {}: there
    are no weights. Pickled files count where there are no safetensors; no code in them runs. Those of PyTorch
    before 1.6, which are no zip files, cannot be mapped, and are read."""
    tensors: Tensors = {}
    for path in folder.glob("model*.safetensors"):
        tensors |= load_file(path)
    if tensors:
        return tensors

    def load(path: Path) -> Any:
        return torch.load(path, mmap=zipfile.is_zipfile(path), weights_only=True)

    for index in folder.glob(f"{SPLIT_WEIGHTS}/key_to_filename.json"):
        tensors |= {name: load(index.with_name(file)) for name, file in read_json(index).items()}
    for path in filter(Path.is_file, folder.glob("pytorch_model*.bin")):
        tensors |= load(path)
    return tensors


class Hlo(llama.LlamaForSamplingNoEmbeddingHlo):
    """The graph of a family. Tensors are [slots, tokens, hidden], in the attention [tokens, slots, heads,
    head_dim]."""

    def __init__(self, family: Family, *arguments: Any, **options: Any):
        """family: whose layers the graph computes; the other arguments are those of transformers-neuronx."""
        super().__init__(*arguments, **options)
        self.family = family
        # A norm makes keys small, whatever their bias.
        self._stores_bare_keys = bool(
            self.neuron_config.kv_cache_quant and K in family.biases and not self.family.head_norms
        )
        self.recurrence = family.recurrent_layers and family.recurrence.on_cores(self.config.tp_degree)
        self._kinds = self.family.kinds or (LayerKind(),) * family.layers

    def inputs(self, *arguments: Any, **options: Any) -> tuple[Any, tuple[int | None, ...]]:
        """Returns the inputs of a graph as transformers-neuronx does, with `last_token_id` left whole: it has
        one number for each slot, and would be cut as tokens are."""
        tensors, sequence_dimensions = super().inputs(*arguments, **options)
        return tensors, (*sequence_dimensions[:3], None, *sequence_dimensions[4:])

    def pre_layer(self, hidden: Any, cache_ids: Any, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Computes what all layers share: rotary positions, masks of each sliding window, rows of recurrent
        layers. Keeps these for the calls of `layer`, which begin with the first layer again. Returns the
        values that transformers-neuronx hands to its own layers, with the family's first rotary positions in
        the place of its own."""
        if self.recurrence:
            self._rows = Rows(self.recurrence, cache_ids, *arguments[:4])
        values = list(super().pre_layer(hidden, cache_ids, *arguments, **options))
        if self._stores_bare_keys:
            positions = hlo.iota(hidden.scribe.s32, (1, self.n_positions), 1)
            self._cached_sin_cos = self._rotation(positions, hidden.dtype)
        own = [_sin_cos(cache_ids, hidden.dtype, rope) for rope in self.family.ropes]
        self._ropes = own or [values[2]]
        values[2] = self._ropes[0]  # for the layers of transformers-neuronx
        self._next = iter(self._kinds)
        windows = {kind.window for kind in self._kinds}
        self._masks = {each: _in_window(values[6], self._shown(each), cache_ids) for each in windows}
        self._active = {each: _in_window(values[7], self._shown(each)) for each in windows}
        return tuple(values)

    def _rotation(self, positions: Any, dtype: Any) -> tuple[Any, Any]:
        """Returns sine and cosine of positions [1, tokens], where all layers have the same."""
        if self.family.ropes:
            return _sin_cos(positions, dtype, self.family.ropes[0])
        return rotary.hlo_rotary_embedding(
            dtype,
            int(self.config.attention_head_size * self.config.rotary_percentage),
            positions,
            base=self.config.rope_theta,
            interpolation_factor=self.config.position_interpolation_factor,
            rope_scaling=self.config.rope_scaling,
        )

    def _shown(self, window: int | None) -> int | None:
        """Returns the sliding window; None for one that hides none of the positions of this graph."""
        return window if window and window < self.n_positions else None

    def layer(self, hidden: Any, *arguments: Any, **options: Any) -> tuple[Any, Any, Any]:
        """Returns hidden [slots, tokens, hidden] after a layer, and the layer's keys and values, or the two
        buffers of its recurrence, with those of the running tokens. Each call is the next layer; `pre_layer`
        comes before the first. arguments: as transformers-neuronx hands them to a layer, last the two
        buffers, LAYER_WEIGHTS and the parameters of `_added_parameters`."""
        if not self.family.has_own_layers:
            return super().layer(hidden, *arguments, **options)
        last_token_id, _rope, cache_ids, start_ids, block_to_seq = arguments[:5]
        others = arguments[7:12]
        keys, values, *rest = arguments[12:]
        kind = next(self._next)
        weights = dict(zip([*LAYER_WEIGHTS, *_added_parameters(self.family, kind.is_recurrent)], rest))
        if self.family.norms == "after":
            weights |= dict.fromkeys(("pre_attn_ln_weight", "pre_mlp_ln_weight"))
        inner = self._norm(hidden, weights["pre_attn_ln_weight"])
        if kind.is_recurrent:
            inner, keys, values = recurrent_layer(self._rows, inner, keys, values, weights, self)
        else:
            with self._attention_of(kind, inner, weights):
                inner, keys, values = self.attention(
                    inner,
                    *(cache_ids, start_ids, last_token_id, block_to_seq),
                    self._ropes[kind.rope or 0],
                    self._masks[kind.window],
                    self._active[kind.window],
                    *others,
                    keys,
                    values,
                    *(weights[name] for name in OF_ATTENTION),
                )
        hidden = hlo.add(self._norm(inner, weights["post_attn_ln_weight"]), hidden)
        inner = self._mlp(self._norm(hidden, weights["pre_mlp_ln_weight"]), weights)
        return hlo.add(self._norm(inner, weights["post_mlp_ln_weight"]), hidden), keys, values

    def _mlp(self, hidden: Any, weights: dict[str, Any]) -> Any:
        """Returns the output of a layer's MLP, or of all its experts by their weights, for hidden [slots,
        tokens, hidden], in the same shape. weights: by the names of LAYER_WEIGHTS and `_added_parameters`."""
        limit = self.family.swiglu_limit
        of_pieces = None
        options = {f"{name}_scales": weights[f"{name}_scales"] for name in ("in0", "in1", "out")}
        if self.family.experts:
            of_experts = self._expert_weights(hidden, weights)
            of_pieces = hlo.cast(_matrix_product(of_experts, weights["expert_of"]), hidden.dtype)
        if "gate_bias" in weights:
            options["in0_bias"] = hlo.cast(weights["gate_bias"], hidden.dtype)
            options["in1_bias"] = hlo.cast(weights["up_bias"], hidden.dtype)
        with _replaced(hlo, multiply=functools.partial(_gated, limit=limit) if limit else multiply):
            output = hlo.gated_mlp_bsh(
                hidden,
                *(weights[f"{name}_weight"] for name in ("in0", "in1", "out")),
                **options,
                activation_function=self._activation(of_pieces),
                tp_degree=self.config.tp_degree,
                neuron_config=self.neuron_config,
            )
        if "down_bias" not in weights:
            return output
        bias = _matrix_product(of_experts, weights["down_bias"])
        return hlo.add(output, hlo.cast(hlo.reshape(bias, output.sizes), output.dtype))

    def _activation(self, of_pieces: Any) -> Any:
        """Returns the activation of the MLP for gates [tokens, columns of a core], a function; in a mixture
        of experts times the weight of each column's expert. of_pieces: [tokens, pieces], the weights of the
        pieces on a core; None: a dense model."""
        activation = hlo.get_activation(self.family.activation)
        if limit := self.family.swiglu_limit:
            activation = functools.partial(_swish, limit=limit)
        if of_pieces is None:
            return activation
        tokens, pieces = of_pieces.sizes

        def weighted(gate: Any) -> Any:
            by_piece = Array(activation(gate)).view(tokens, pieces, -1)
            return (by_piece * Array(of_pieces).view(tokens, pieces, 1)).view(*gate.sizes).node

        return weighted

    def _expert_weights(self, hidden: Any, weights: dict[str, Any]) -> Any:
        """Returns the weight of each expert for each token, float32 [tokens of all slots, experts]. Of the
        routed experts, `per_token` have their softmax, which is normalized if `is_normalized`, and the others
        0. The shared experts follow: each has 1, or with `has_shared_gate` the sigmoid of its logit.

        hidden: [slots, tokens, hidden]. weights: by name; `router` and, if there is one, `router_bias` are
        read.
        """
        experts = self.family.experts
        rows = Array(hidden).view(-1, hidden.sizes[2]).float()
        logits = rows.apply(_matrix_product, weights["router"])
        if "router_bias" in weights:
            logits += Array(weights["router_bias"]).view(1, -1)
        routed = logits.slice(1, 0, experts.routed)
        best = hlo.topk(hlo.softmax(routed.node, 1), 1, k=experts.per_token)
        best, numbers = (Array(each).view(-1, experts.per_token, 1) for each in best)
        if experts.is_normalized:
            best = best / best.apply(hlo.reduce_sum, 1, True)
        every = Array(hlo.iota(numbers.node.dtype, (1, 1, experts.routed), 2))
        placed = best * numbers._with(hlo.equal, every).float()
        placed = hlo.reduce_sum(placed.node, 1)
        if not experts.shared:
            return placed
        if self.family.has_shared_gate:
            shared = logits.slice(1, experts.routed, experts.shared).apply(sigmoid).node
        else:
            shared = hlo.full(1.0, placed.dtype, (placed.sizes[0], experts.shared))
        return hlo.concatenate([placed, shared], 1)

    def _norm(self, tensor: Any, weight: Any) -> Any:
        """Returns `tensor` after an RMS norm. weight: None where the family has no norm at this place, and
        `tensor` stays."""
        if weight is None:
            return tensor
        return hlo.rms_norm(
            tensor,
            weight,
            self.config.rms_norm_eps,
            neuron_config=self.neuron_config,
            tp_degree=self.config.tp_degree,
        )

    @contextlib.contextmanager
    def _attention_of(self, kind: LayerKind, hidden: Any, weights: dict[str, Any]) -> Iterator[None]:
        """A context manager: while the body runs, transformers-neuronx's attention has what this layer has:
        norms of queries and keys, no positions, capped scores, sinks, a gate of the output. Its kernel for
        long prompts is not used with caps, sliding windows or sinks, which it lacks. hidden: the input of the
        attention."""
        turn = rotary.rotate_half
        score = attention.score
        cap = self.family.attention_cap

        def rotate_half(query: Any, key: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
            if self.family.head_norms:
                query = self._norm_of_heads(query, weights["q_norm"])
                key = self._norm_of_heads(key, weights["k_norm"])
            return (query, key) if kind.rope is None else turn(query, key, *arguments, **options)

        changed = {"score": lambda *arguments, **options: _capped(score(*arguments, **options), cap)}
        if self.family.has_sinks:
            with_sinks = functools.partial(_with_sinks, weights["sinks"])
            changed["context"] = functools.partial(with_sinks, attention.context, 2)
            changed["context_combined"] = functools.partial(with_sinks, attention.context_combined, 1)
        if cap or self.family.has_sinks or self._shown(kind.window):
            changed["flash_attention"] = lambda query, key, value: None
        if self.family.has_attention_gate:
            gated = functools.partial(_gated_output, hidden, weights["attention_gate"], attention.output)
            changed["output"] = gated
        with _replaced(rotary, rotate_half=rotate_half), _replaced(attention, **changed):
            yield

    def attention(self, *arguments: Any, **options: Any) -> tuple[Any, Any, Any]:
        """Returns the output of transformers-neuronx's attention, and the cached keys and values with those
        of the running tokens added. A KV cache in FP8 is read and written by an Fp8Cache, which is used for
        this call alone; with `_stores_bare_keys` the keys are then without their bias. arguments: as
        transformers-neuronx's attention takes them; the weights come last, in the order of OF_ATTENTION."""
        if not self.neuron_config.kv_cache_quant:
            return super().attention(*arguments, **options)
        others = arguments[: -len(OF_ATTENTION)]
        weights = dict(zip(OF_ATTENTION, arguments[len(others) :]))
        cache = Fp8Cache(self.neuron_config)
        if self._stores_bare_keys:
            weights["attn_q_bias"], cache.key_bias = _split_key_bias(
                weights["attn_q_bias"], *others[-2].sizes[2:]
            )
            cache.cached_sin_cos = self._cached_sin_cos
        with cache.replaced():
            return super().attention(*others, *weights.values(), **options)

    def _norm_of_heads(self, tensor: Any, weight: Any) -> Any:
        """Returns queries or keys [tokens, slots, heads, size] after their norm, over each head or over all
        heads of all cores, as the family has it."""
        tokens, slots, heads, size = sizes = tensor.sizes
        eps = self.config.rms_norm_eps
        if self.family.head_norms == "each":
            rows = Array(tensor).view(tokens * slots, heads, size)
            return rows.apply(hlo.rms_norm, weight, eps, 2).view(*sizes).node
        count = heads * size * self.config.tp_degree
        return norm_of_all_cores(Array(tensor), weight, count, self.config).apply(hlo.cast, tensor.dtype).node

    def ln_lm_head(self, *arguments: Any, **options: Any) -> Any:
        """Returns the logits, capped if the family has a cap."""
        return _capped(super().ln_lm_head(*arguments, **options), self.family.logit_cap)


class Fp8Cache:
    """The KV cache of an attention in FP8, without scales.

    Keys and values of the running tokens are rounded as those in the cache, so a token's output does not
    depend on whether the tokens before it run in the same call. Biases of keys may exceed FP8's range: they
    are not stored, but added after the cache is read. Tensors are [tokens, slots, kv heads, head_dim].
    """

    key_bias: Any = None  # [kv heads, head_dim]
    cached_sin_cos: tuple[Any, Any] | None = None  # of all positions in the cache

    def __init__(self, neuron_config: Any):
        """Wraps the functions of transformers-neuronx as they are now."""
        self._config = neuron_config
        self._project = attention.query_key_value
        self._rotate = rotary.rotate_half
        self._key: Any = None  # of the running tokens, with its bias
        self._bare: Any = None  # without it
        self._reads_keys = itertools.cycle((True, False))  # keys are read before values

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """A context manager: while the body runs, transformers-neuronx's attention reads and writes the cache
        by this object. To be used once, for one layer."""
        with (
            _replaced(
                attention, query_key_value=self._query_key_value, quantize_kv_cache_direct_cast=self._write
            ),
            _replaced(rotary, rotate_half=self._rotate_half),
            _replaced(
                llama_hlo,
                quantize_kv_cache_direct_cast=self._write,
                dequantize_kv_cache_direct_cast=self._read,
            ),
        ):
            yield

    def _query_key_value(self, *arguments: Any, **options: Any) -> tuple[Any, Any, Any]:
        """Returns queries, keys and values; the values are rounded as those in the cache."""
        query, key, value = self._project(*arguments, **options)
        return query, key, self._rounded(value)

    def _rotate_half(self, query: Any, key: Any, sin_cos: Any, *arguments: Any, **options: Any) -> Any:
        """Returns queries and keys after their rotation; keys are rounded as those in the cache. If biases of
        keys are not stored, these are added afterwards, and the keys without them are kept for `_write`."""
        query, key = self._rotate(query, key, sin_cos, *arguments, **options)
        bare = self._rounded(key)
        if self.key_bias is None:
            return query, bare
        self._rotation_options = (arguments, options)
        self._bare = bare
        self._key = hlo.add(bare, self._rotated_bias(bare.sizes, bare.dtype, sin_cos))
        return query, self._key

    def _rotated_bias(self, sizes: tuple[int, ...], dtype: Any, sin_cos: Any) -> Any:
        """Returns the bias of the keys at the positions of `sin_cos`, broadcast to `sizes`. `_rotate_half`
        comes before."""
        arguments, options = self._rotation_options
        bias = hlo.broadcast(hlo.cast(self.key_bias, dtype), sizes, [2, 3])
        return self._rotate(bias, bias, sin_cos, *arguments, **options)[1]

    def _rounded(self, tensor: Any) -> Any:
        """Returns a tensor in the dtype of the layers, rounded to the values of FP8."""
        return from_fp8(self._write(tensor, self._config), self._config)

    def _write(self, tensor: Any, config: Any) -> Any:
        """Returns a tensor in FP8, limited to FP8_MAX; in the place of the running keys, those without their
        bias."""
        stored = self._bare if tensor is self._key else tensor
        return to_fp8(hlo.clamp(stored, -FP8_MAX, FP8_MAX), config)

    def _read(self, cached: Any, config: Any) -> Any:
        """Returns cached keys or values in the dtype of the layers, keys with the bias that is not stored.
        The first call is for keys, the next for values, and so on."""
        tensor = from_fp8(cached, config)
        if not next(self._reads_keys) or self.key_bias is None:
            return tensor
        positions, _slots, *head = tensor.sizes
        bias = self._rotated_bias((positions, 1, *head), tensor.dtype, self.cached_sin_cos)
        return (Array(tensor) + Array(bias)).node


def _split_key_bias(bias: Any, kv_heads: int, head_dim: int) -> tuple[Any, Any]:
    """Divides the bias of queries, keys and values on a core, side by side. Returns it with zeros for the
    keys, and the bias of the keys: [kv_heads, head_dim]."""
    size = kv_heads * head_dim
    queries, keys, values = Array(bias).split(bias.sizes[0] - 2 * size, size, size)
    others = hlo.concatenate([queries.node, hlo.full(0, bias.dtype, (size,)), values.node], 0)
    return others, keys.view(kv_heads, head_dim).node


def _matrix_product(left: Any, right: Any) -> Any:
    """Returns the product of [rows, n] and [n, columns]: [rows, columns]."""
    dimensions = {"lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}
    return hlo.dot_general(left, right, dimension_numbers=dimensions)


def _capped(tensor: Any, cap: float | None) -> Any:
    """Returns cap * tanh(tensor / cap), or `tensor` itself without a cap."""
    if not cap:
        return tensor
    tensor = hlo.divide(tensor, float(cap))
    return hlo.multiply(tensor.dtype[tensor.sizes].Tanh(tensor), float(cap))


def _swish(gate: Any, limit: float) -> Any:
    """Returns gpt-oss's activation of the gates: gate * sigmoid(1.702 * gate), of gates up to `limit`."""
    gate = hlo.clamp(gate, maximum=limit)
    return multiply(gate, gate.dtype[gate.sizes].Logistic(multiply(gate, 1.702)))


def _gated(active: Any, up: Any, limit: float) -> Any:
    """Returns `active` * (`up` + 1) of gpt-oss, with `up` kept between -limit and limit."""
    return multiply(active, hlo.add(hlo.clamp(up, -limit, limit), 1.0))


def _with_sinks(sinks: Any, context: Callable[..., Any], count: int, *arguments: Any, **options: Any) -> Any:
    """Returns the output of `context`, as if the sink of each head were one more logit of the softmax:
    [tokens, slots, heads, head_dim]. `context` gets all arguments and options; the first `count` arguments
    are scores [slots, heads, tokens, positions]."""
    scores = [Array(each).float() for each in arguments[:count]]
    largest = functools.reduce(hlo.maximum, (hlo.reduce_max(each.node, 3, True) for each in scores))
    shifted = ((each - Array(largest)).apply(hlo.exp) for each in scores)
    others = functools.reduce(Array.__add__, (each.apply(hlo.reduce_sum, 3, True) for each in shifted))
    sink = (Array(sinks).view(1, -1, 1, 1) - Array(largest)).apply(hlo.exp)
    share = (others / (others + sink)).apply(hlo.permute, [2, 0, 1, 3])
    output = context(*arguments, **options)
    return (Array(output) * share.apply(hlo.cast, output.dtype)).node


def _gated_output(hidden: Any, weight: Any, output: Callable[..., Any], context: Any, *others: Any) -> Any:
    """Returns `output` of a context [tokens, slots, heads * head_dim] times its gate. hidden, from which the
    gate is computed: [slots, tokens, hidden]; weight: [hidden, heads * head_dim]."""
    rows = Array(hidden).apply(hlo.permute, [1, 0, 2]).view(-1, hidden.sizes[2])
    gate = rows.apply(_matrix_product, weight).apply(sigmoid).view(*context.sizes)
    return output((Array(context) * gate).node, *others)


def _sin_cos(positions: Any, dtype: Any, rope: Rope) -> tuple[Any, Any]:
    """Returns sine and cosine [slots, tokens, pairs] of positions [slots, tokens], times `rope.factor`;
    computed in float32, then cast to `dtype`."""
    frequencies = Array(hlo.literal(positions.scribe.f32, torch.tensor([[rope.frequencies]])))
    angles = (Array(positions).view(*positions.sizes, 1).float() * frequencies).node
    both = (hlo.multiply(each, rope.factor) for each in (hlo.sin(angles), hlo.cos(angles)))
    return tuple(hlo.cast(each, dtype) for each in both)


def _in_window(mask: Any, window: int | None, positions: Any = None) -> Any:
    """Returns `mask` [slots, tokens, positions] without positions that are `window` or more before their
    token; as it is without a window, or if it is None or has fewer dimensions. positions: of the tokens,
    [slots, tokens]; None for a mask between the tokens of one call."""
    if not window or mask is None or len(mask.sizes) < 3:
        return mask
    s32 = mask.scribe.s32
    positions = positions or hlo.iota(s32, mask.sizes[:2], 1)
    first = hlo.broadcast(hlo.subtract(positions, window), mask.sizes, [0, 1])
    return hlo.logical_and(mask, hlo.greater(hlo.iota(s32, mask.sizes, 2), first))
