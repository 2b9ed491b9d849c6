"""What makes a forward pass on the slots short: attention over the filled part of their cache, linear layers packed for the
CPU it runs on, and one flat forward for models that are built like Llama.

`torch_model.py` decides which of these a model gets, and sees to it that the logits stay those of transformers. This layer
knows no checkpoints and no settings.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from kernels import INT8_MOST, INT8_ZERO, KERNEL_DTYPES, SMALLEST, kernels_for, multiplies, packed_bytes

PACKED_FOR_ROWS = 16  # oneDNN's layout for a single row is slow for several; that for several is the same for any number
FEW_ROWS = 128  # with more, oneDNN is as fast
BLOCK = 16  # positions; without whole blocks, the last bits of a row's attention would depend on how long the others are


def in_blocks(tokens: int, window: int) -> int:
    """How much of a window a decode step looks at when its longest row has so many tokens: whole blocks."""
    return min(-(-tokens // BLOCK) * BLOCK, window)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Noughts that take memory, and time, where something is written over them, and not before: torch writes its own."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class Step:
    """One forward pass: which rows of the cache it runs on, and where each of its tokens stands.

    rows: the slots, a range; positions: int64 [rows, q], the position of each token; filled: how much of the window is looked
    at, this pass included. More than one token a row are a prompt, or a part of one, in one row.
    """

    def __init__(self, rows: slice, positions: torch.Tensor, filled: int):
        self.rows = rows
        self.positions = positions.contiguous()
        self.filled = filled
        self.is_prefill = positions.shape[1] > 1
        self.begin = filled - positions.shape[1]  # of a prefill: where its first token stands
        # Where in the window keys and values go.
        self.places = torch.arange(self.begin, filled) if self.is_prefill else self.positions
        self.windows: dict[int, int | None] = {}  # sliding window that each layer asked for
        self._masks: dict[int | None, torch.Tensor] = {}
        self._row_index = torch.arange(rows.start, rows.stop, device=positions.device)
        self._key_index = positions[:, 0]

    def mask(self, window: int | None) -> torch.Tensor:
        """Which places of the window each token may look at: bool [rows, 1, q, filled], True: it may."""
        at = self.places.to(self.positions.device).view(-1, 1, self.positions.shape[1], 1)
        key_at = torch.arange(self.filled, device=at.device)
        allowed = key_at <= at
        return allowed if window is None else allowed & (key_at > at - window)

    def additive_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """The same as numbers to add to the scores."""
        if window is not None and window >= self.filled:
            window = None
        if window not in self._masks:
            lowest = torch.finfo(dtype).min
            self._masks[window] = torch.zeros((), dtype=dtype, device=self.positions.device).where(self.mask(window), lowest)
        return self._masks[window]

    def write(self, store: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Puts the keys and values of this pass, [rows, q, 2, kv heads, head size], where they belong in the slots' store,
        [2, slots, kv heads, window, head size]. Returns those of the filled part: [rows, kv heads, filled, head size] each.
        Either may come alone, as one instead of two.
        """
        if self.is_prefill:
            store[:, self.rows, :, self.begin : self.filled] = states.permute(2, 0, 3, 1, 4)
        else:
            store[:, self._row_index, :, self._key_index] = states[:, 0]
        return store[:, self.rows, :, : self.filled].unbind()


def attend(
    step: Step,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention over the filled part of the rows, each token from its own position.

    query: [rows, heads, q, head size]; key, value: [rows, kv heads, filled, head size]. Returns [rows, heads, q, head size].
    The query heads that share a key head go in as if they were so many tokens: keys and values are read once, never repeated.
    """
    rows, heads, length, _head_size = query.shape
    kv_heads, filled = key.shape[1:3]
    if length > 1 and softcap is None:
        if step.begin == 0 and (window is None or window >= filled):
            return F.scaled_dot_product_attention(
                query, key, value, scale=scaling, is_causal=True, enable_gqa=heads != kv_heads
            )
        mask = step.additive_mask(window, query.dtype)
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=heads != kv_heads)
    grouped = query.reshape(rows, kv_heads, heads // kv_heads * length, -1)
    if softcap is None:
        out = F.scaled_dot_product_attention(grouped, key, value, step.additive_mask(window, query.dtype), scale=scaling)
        return out.view(rows, heads, 1, -1)
    scores = torch.tanh(torch.matmul(grouped, key.transpose(-1, -2)) * (scaling / softcap)) * softcap
    scores = scores.view(rows, heads, length, filled) + step.additive_mask(window, query.dtype)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights.view(rows, kv_heads, -1, filled), value).view(rows, heads, length, -1)


_has_onednn = torch.backends.mkldnn.is_available()
_packed_linear = torch.ops.mkldnn._linear_pointwise.default if _has_onednn else None
_int8_linear = torch.ops.onednn.qlinear_pointwise.default if _has_onednn else None


class Packed(nn.Module):
    """A linear layer whose weight is laid out once as oneDNN's kernels want it, not anew at every call.

    [..., in] → [..., out]. Unlike torch's own choice of kernels, a row's result hardly depends on the number of rows. Up to
    `few` rows have a kernel of ours, if it can read what oneDNN has laid out, and in that it does not depend on them at all.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_FOR_ROWS)
        self.bias = None if bias is None else bias.detach().clone()
        self._outside, inside = weight.shape
        self.few = 0
        if weight.dtype == torch.bfloat16 and multiplies_few(torch.bfloat16):
            self._address = torch.ops.mkldnn.data_ptr(self.weight)
            self.few = FEW_ROWS if self._is_as_expected(inside) else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if 0 < x.numel() <= self.few * x.shape[-1]:
            is_flat = x.dim() == 2  # as a rule; to be asked takes less time than to be made so
            return self._multiply(x) if is_flat else self._multiply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return _packed_linear(x, self.weight, self.bias, "none", [], "")

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return kernels_for(torch.bfloat16).multiply(x.contiguous(), self._address, self.bias, self._outside)

    def _is_as_expected(self, inside: int) -> bool:
        """Whether the weight lies as our kernel reads it. oneDNN chooses that by shape and processor, and does not tell."""
        if inside % 2 or torch.ops.mkldnn._nbytes(self.weight) != packed_bytes(self._outside, inside // 2):
            return False
        x = torch.linspace(-1, 1, 2 * inside).sin_().to(torch.bfloat16).view(2, inside)
        expected = _packed_linear(x, self.weight, self.bias, "none", [], "").float()
        return torch.allclose(self._multiply(x).float(), expected, rtol=0.01, atol=0.01 * expected.abs().max().item())


@functools.cache
def multiplies_few(part: torch.dtype) -> bool:
    """Whether a kernel of ours multiplies a few rows of bfloat16 or int8. It reads weights from memory up to twice as fast as
    oneDNN's, but where there are matrix units, which it does not use, that is not known."""
    has_operators = all(hasattr(torch.ops.mkldnn, name) for name in ("data_ptr", "_nbytes"))
    return _has_onednn and has_operators and multiplies(part) and not torch.cpu._is_amx_tile_supported()


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this CPU has the kernels, and they are right."""
    weight, bias, x = (torch.linspace(-1, 1, n).to(dtype) for n in (48 * 32, 48, 3 * 32))
    weight, x = weight.view(48, 32), x.view(3, 32)
    try:
        return torch.allclose(Packed(weight, bias)(x), F.linear(x, weight, bias), rtol=0.02, atol=0.02)
    except Exception:
        return False


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it, and torch knows of them."""
    return _has_onednn and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def packing_pays(weights: Sequence[torch.Tensor]) -> bool:
    """Whether one row gets through some linear layers sooner when they are packed, on this machine. Several rows do, but
    float32 has good kernels for one row that want the weight as it is."""
    plain = [functools.partial(F.linear, weight=weight) for weight in weights]
    packed = [Packed(weight, None).forward for weight in weights]
    inputs = [weight.new_ones(1, weight.shape[1]) for weight in weights]
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(5):
        for layers, times in zip((packed, plain), taken):
            started_at = time.perf_counter()
            for multiply, x in zip(layers, inputs):
                multiply(x)
            times.append(time.perf_counter() - started_at)
    return min(taken[0]) < min(taken[1])


class Int8:
    """A linear layer in int8: a scale for each output, and one for each token, made when it comes, of its largest number.

    [..., in] → [..., out]. The products are added up as whole numbers, so a row's result does not depend on its company.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        dtype, weight = weight.dtype, weight.detach().float()
        steps = weight.abs().amax(1).clamp_min_(float(SMALLEST)) / float(INT8_MOST)
        rounded = (weight / steps[:, None]).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._steps = steps / float(INT8_MOST)  # a token's own step is its largest number / INT8_MOST
        self._offsets = torch.zeros(len(steps), dtype=torch.int64)
        self._surplus = int(INT8_ZERO) * rounded.sum(1, dtype=torch.int32)
        self._bias = None if bias is None else bias.detach().clone()
        self.few = 0
        if multiplies_few(torch.int8):
            self._address = torch.ops.mkldnn.data_ptr(self._weight)
            self.few = FEW_ROWS if self._is_as_expected(weight.shape, dtype) else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        # oneDNN has fast kernels for two rows or more, and on most CPUs for unsigned bytes only.
        rounded = torch.empty((max(2, len(tokens)), x.shape[-1]), dtype=torch.uint8)
        largest = kernels_for(x.dtype).round(tokens.contiguous(), rounded)
        multiply = self._multiply_few if len(largest) <= self.few else self._multiply
        return multiply(rounded, largest, x.dtype).unflatten(0, x.shape[:-1])

    def _multiply(self, rounded: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = _int8_linear(
            rounded, 1.0, int(INT8_ZERO), self._weight, self._steps, self._offsets, None, 1.0, 0, dtype, "none", [], ""
        )[: len(largest)].mul_(largest)
        return out if self._bias is None else out.add_(self._bias)

    def _multiply_few(self, rounded: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        told = self._address, self._steps, self._surplus, self._bias
        return kernels_for(dtype).multiply_bytes(rounded[: len(largest)], largest, *told)

    def _is_as_expected(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """As of `Packed`. After the weights there are sums of oneDNN's own."""
        outside, inside = shape
        if inside % 4 or torch.ops.mkldnn._nbytes(self._weight) < packed_bytes(outside, inside // 4):
            return False
        rounded = (torch.arange(2 * inside) * 37 % 256).to(torch.uint8).view(2, inside)
        expected, found = (multiply(rounded, torch.ones(2, 1), dtype) for multiply in (self._multiply, self._multiply_few))
        return torch.allclose(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def can_quantize(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this CPU has the kernel, and adds up without an overflow."""
    x = torch.full((4, 1024), -1.0, dtype=dtype)
    x[1, ::2] = 0.5
    x[2] = 1.0
    weight = torch.ones(48, 1024)
    weight[::2, 512:] = -1.0
    try:
        return torch.allclose(Int8(weight, None).forward(x).float(), x.float() @ weight.T, rtol=0.02, atol=0.5)
    except Exception:
        return False


def pack(model: nn.Module) -> None:
    """Replaces the linear layers of a transformers model (GPT-2's Conv1D, its transpose, too), and lets their weights go.

    What is left is copied: transformers maps a checkpoint's file, and one small tensor of it would keep all of it in memory.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, Packed(child.weight, child.bias))
            elif type(child).__name__ == "Conv1D":
                setattr(parent, name, Packed(child.weight.T, child.bias))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


class _Norm(NamedTuple):
    weight: torch.Tensor
    epsilon: float


class _Layer(NamedTuple):
    input_norm: _Norm
    qkv: Callable[[torch.Tensor], torch.Tensor]
    out: Callable[[torch.Tensor], torch.Tensor]
    norm: _Norm
    gate_up: Callable[[torch.Tensor], torch.Tensor]
    down: Callable[[torch.Tensor], torch.Tensor]
    scaling: float
    window: int | None
    store: torch.Tensor  # keys and values: [2, slots, kv heads, window, head size]


class Plain:
    """What stands between the products of a `Decoder`, in calls of torch, on any device."""

    attends_to_prompts = False  # so that not a bit of a token depends on those that it is run with

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]):
        self._activation = activation

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: _Norm) -> torch.Tensor:
        """Adds `delta` to `x`, in place, and returns the RMSNorm of the sum: [tokens, hidden] each."""
        return torch.rms_norm(x.add_(delta), norm.weight.shape, norm.weight, norm.epsilon)

    def attention(
        self, layer: _Layer, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], step: Step
    ) -> torch.Tensor:
        """Stores keys and values of the pass, and lets its tokens look at what their slots hold. qkv: [tokens, heads and twice
        the kv heads, head size]; angles: cosines and sines, [tokens, head size] each. Returns [tokens, heads * head size]."""
        kv_heads, turned = layer.store.shape[2], qkv.shape[1] - layer.store.shape[2]
        cos, sin = (angle[:, None] for angle in angles)
        first, second = qkv[:, :turned].chunk(2, -1)
        qkv[:, :turned] = qkv[:, :turned] * cos + torch.cat((-second, first), -1) * sin
        qkv = qkv.view(*step.positions.shape, *qkv.shape[1:])
        key, value = step.write(layer.store, qkv[:, :, -2 * kv_heads :].unflatten(2, (2, kv_heads)))
        return self._attend(layer, qkv, key, value, step)

    def _attend(self, layer: _Layer, qkv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step) -> torch.Tensor:
        query = qkv[:, :, : -2 * layer.store.shape[2]].transpose(1, 2)
        out = attend(step, query, key, value, layer.scaling, layer.window)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The activation of the first half times the second: [tokens, 2 * size] → [tokens, size]."""
        gate, up = gate_up.chunk(2, -1)
        return self._activation(gate).mul_(up)


class Compiled(Plain):
    """The same in compiled kernels, on a CPU. The attention of prompts is torch's where it has a good one."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype):
        super().__init__(activation)
        self._kernels = kernels_for(dtype)
        self.attends_to_prompts = dtype == torch.bfloat16 and multiplies_few(torch.bfloat16)
        probe = torch.linspace(-8.0, 8.0, 100)
        self._is_silu = torch.equal(activation(probe), F.silu(probe))

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: _Norm) -> torch.Tensor:
        return self._kernels.add_norm(x, delta, *norm)

    def attention(
        self, layer: _Layer, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], step: Step
    ) -> torch.Tensor:
        rows, length = step.positions.shape
        self._kernels.rotate(qkv, angles, step.places, layer.store, step.rows.start, length)
        if step.is_prefill and self.attends_to_prompts:
            slot = step.rows.start
            return self._kernels.attend_prompt(qkv, step.begin, layer.store, slot, layer.scaling, layer.window)
        if step.is_prefill:
            key, value = layer.store[:, step.rows, :, : step.filled].unbind()
            return self._attend(layer, qkv.view(rows, length, *qkv.shape[1:]), key, value, step)
        return self._kernels.attend(qkv, step.places, layer.store, step.rows.start, layer.scaling, layer.window)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._kernels.gate(gate_up) if self._is_silu else super().gate(gate_up)


class Decoder:
    """The forward pass of a model that is built like Llama, without transformers: RMSNorm, rotary positions, grouped queries
    and a gated MLP (Llama, Mistral, Qwen2, SmolLM and others).

    Queries, keys and values come of one product, gate and up of another. The weights are shared with `model` until `lay_out`;
    whoever calls it lets go of the model first.
    """

    def __init__(self, model: nn.Module, slots: int, window: int, windows: dict[int, int | None]):
        body = model.model
        attention = body.layers[0].self_attn
        self._head_size = attention.head_dim
        kv_heads = attention.k_proj.out_features // self._head_size
        self._embedding, dtype = body.embed_tokens.weight.detach(), body.embed_tokens.weight.dtype
        self._rotary = body.rotary_emb
        self._norm = _norm(body.norm, dtype)
        self._head, self._vocab_size = _joined(model.lm_head), model.lm_head.out_features
        shape = (2, slots, kv_heads, window, self._head_size)
        self._layers = [
            _Layer(
                _norm(layer.input_layernorm, dtype),
                _joined(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                _joined(layer.self_attn.o_proj),
                _norm(layer.post_attention_layernorm, dtype),
                _joined(layer.mlp.gate_proj, layer.mlp.up_proj),
                _joined(layer.mlp.down_proj),
                layer.self_attn.scaling,
                windows[number],
                zeros(shape, self._embedding.dtype, self._embedding.device),
            )
            for number, layer in enumerate(body.layers)
        ]
        activation = body.layers[0].mlp.act_fn
        compiles = self._embedding.device.type == "cpu" and dtype in KERNEL_DTYPES
        self._between = Compiled(activation, dtype) if compiles else Plain(activation)
        self.few = 0  # tokens that go through together, of which not a bit depends on the others

    @staticmethod
    def suits(model: nn.Module) -> bool:
        """Whether a model has the parts, and no others. Whether they do the same, its logits tell."""
        body = getattr(model, "model", None)
        if _parts(model) != {"model", "lm_head"} or _parts(body) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            return False
        parts = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
        first = body.layers[0]
        shapes = [parameter.shape for parameter in first.parameters()]
        turned = 2 * getattr(body.rotary_emb, "inv_freq", torch.empty(0)).numel()
        return turned == getattr(first.self_attn, "head_dim", None) and all(
            _parts(layer) == parts
            and _parts(layer.self_attn) == {"q_proj", "k_proj", "v_proj", "o_proj"}
            and _parts(layer.mlp) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
            and hasattr(layer.self_attn, "scaling")
            and layer.self_attn.head_dim == first.self_attn.head_dim
            and hasattr(layer.input_layernorm, "variance_epsilon")
            and [parameter.shape for parameter in layer.parameters()] == shapes
            and len({layer.self_attn.get_submodule(name).bias is None for name in ("q_proj", "k_proj", "v_proj")}) == 1
            for layer in body.layers
        )

    def lay_out(self, form: type[Packed] | type[Int8]) -> None:
        """Gives every linear layer another form, and lets their weights go."""
        made: list[Packed | Int8] = []

        def as_form(linear: functools.partial) -> Callable[[torch.Tensor], torch.Tensor]:
            made.append(form(**linear.keywords))
            return made[-1].forward  # the method itself: calling a module costs as much as a small product

        self._head, self._embedding = as_form(self._head), self._embedding.clone()  # see `pack`
        for number, layer in enumerate(self._layers):
            linears = {name: as_form(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")}
            self._layers[number] = layer._replace(**linears)
        self.few = min(linear.few for linear in made) if self._between.attends_to_prompts else 0

    def __call__(self, tokens: torch.Tensor, step: Step, logits_to_keep: int) -> torch.Tensor:
        """tokens: int64 [rows, q] → [rows, logits_to_keep, vocab], the logits after the last of them; 0: all."""
        rows, length = tokens.shape
        x, delta = self._layers_of(tokens.flatten(), [step])
        x, delta = (t.view(rows, length, -1)[:, -logits_to_keep:].flatten(0, 1).contiguous() for t in (x, delta))
        return self._head(self._between.add_norm(x, delta, self._norm)).view(rows, -1, self._vocab_size)

    def both(self, tokens: torch.Tensor, step: Step, prompt: torch.Tensor, part: Step) -> torch.Tensor:
        """A decode step, int64 [rows, 1], and a part of a prompt, int64 [1, q], in one pass, so that each weight is read once.
        A row of the step that is free may be the prompt's. Returns [rows + 1, vocab], the logits after the last token of each.
        """
        rows = len(tokens)
        x, delta = self._layers_of(torch.cat((tokens[:, 0], prompt[0])), [step, part])
        x, delta = (torch.cat((t[:rows], t[-1:])) for t in (x, delta))
        return self._head(self._between.add_norm(x, delta, self._norm))

    def _layers_of(self, tokens: torch.Tensor, steps: Sequence[Step]) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [tokens], those of one step after those of the other → [tokens, hidden], and what is to be added to it."""
        between, counts = self._between, [step.positions.numel() for step in steps]
        positions = torch.cat([step.positions.flatten() for step in steps])
        cos, sin = (angles[0].contiguous() for angles in self._rotary(self._embedding, position_ids=positions[None]))
        angles = list(zip(cos.split(counts), sin.split(counts)))
        x = F.embedding(tokens, self._embedding)
        delta = torch.zeros_like(x)
        for layer in self._layers:
            qkv = layer.qkv(between.add_norm(x, delta, layer.input_norm)).unflatten(-1, (-1, self._head_size))
            if len(steps) == 1:
                looked = between.attention(layer, qkv, angles[0], steps[0])
            else:
                looked = torch.cat([between.attention(layer, *own) for own in zip(qkv.split(counts), angles, steps)])
            gate_up = layer.gate_up(between.add_norm(x, layer.out(looked), layer.norm))
            delta = layer.down(between.gate(gate_up))
        return x, delta


def _parts(module: nn.Module | None) -> set[str]:
    return {name for name, _ in module.named_children()} if isinstance(module, nn.Module) else set()


def _norm(module: nn.Module, dtype: torch.dtype) -> _Norm:
    return _Norm(module.weight.detach().to(dtype, copy=True), module.variance_epsilon)


def _joined(*linears: nn.Linear) -> functools.partial:
    """A linear layer that gives what all of them give, side by side; its weight is theirs from now on."""
    weight, bias = linears[0].weight.detach(), linears[0].bias
    if len(linears) > 1:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = None if bias is None else torch.cat([linear.bias for linear in linears])
        for linear, part in zip(linears, weight.split([linear.out_features for linear in linears])):
            linear.weight = nn.Parameter(part, requires_grad=False)
    return functools.partial(F.linear, weight=weight, bias=bias if bias is None else bias.detach())
