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

PACKED_FOR_ROWS = 16  # oneDNN's layout for a single row is slow for several; that for several is the same for any number
BLOCK = 16  # positions; without whole blocks, the last bits of a row's attention would depend on how long the others are
INT8_MOST = 127.0
SMALLEST = 1e-30  # what stands for nothing but noughts, which have no largest number to be divided by


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
        self.positions = positions
        self.filled = filled
        self.is_prefill = positions.shape[1] > 1
        self.begin = filled - positions.shape[1]  # of a prefill: where its first token stands
        self.windows: dict[int, int | None] = {}  # sliding window that each layer asked for
        self._masks: dict[int | None, torch.Tensor] = {}
        self._row_index = torch.arange(rows.start, rows.stop, device=positions.device)
        self._key_index = positions[:, 0]

    def mask(self, window: int | None) -> torch.Tensor:
        """Which positions each token may look at: bool [rows, 1, q, filled], True: it may."""
        at = self.positions[:, None, :, None]
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

    [..., in] → [..., out]. Unlike torch's own choice of kernels, a row's result hardly depends on the number of rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_FOR_ROWS)
        self.bias = None if bias is None else bias.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _packed_linear(x, self.weight, self.bias, "none", [], "")


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
        weight = weight.detach().float()
        steps = weight.abs().amax(1).clamp_min_(SMALLEST) / INT8_MOST
        rounded = (weight / steps[:, None]).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._steps = steps / INT8_MOST  # a token's own step is its largest number / INT8_MOST
        self._offsets = torch.zeros(len(steps), dtype=torch.int64)
        self._bias = None if bias is None else bias.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(-1, keepdim=True).float().clamp_min_(SMALLEST)
        rounded = (x * (INT8_MOST / largest)).round_().to(torch.int8)
        if is_alone := largest.numel() == 1:
            rounded = torch.cat((rounded, rounded))  # oneDNN's fast kernels are for two rows or more
        out = _int8_linear(
            rounded, 1.0, 0, self._weight, self._steps, self._offsets, None, 1.0, 0, x.dtype, "none", [], ""
        ).mul_(largest)
        if is_alone:
            out = out[:1]
        return out if self._bias is None else out.add_(self._bias)


def can_quantize(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this CPU has the kernel, and adds up without an overflow."""
    x = torch.full((3, 1024), -1.0, dtype=dtype)
    x[1, ::2] = 0.5
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


class _Norm:
    """RMSNorm. On a CPU as the layer normalization of `x` beside its negative, of which the mean is nought and the variance
    the mean square: that is one kernel there, and torch's own RMSNorm a dozen."""

    def __init__(self, weight: torch.Tensor, epsilon: float):
        self._epsilon = epsilon
        self._weight, self._signs = weight.detach(), None
        if weight.device.type == "cpu":
            self._weight, self._signs = torch.cat((self._weight, self._weight)), weight.new_tensor([[1.0], [-1.0]])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._signs is None:
            return torch.rms_norm(x, self._weight.shape, self._weight, self._epsilon)
        both = (x.unsqueeze(-2) * self._signs).flatten(-2)
        return F.layer_norm(both, self._weight.shape, self._weight, None, self._epsilon)[..., : x.shape[-1]]


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


class Decoder:
    """The forward pass of a model that is built like Llama, without transformers: RMSNorm, rotary positions, grouped queries
    and a gated MLP (Llama, Mistral, Qwen2, SmolLM and others).

    It does in some 20 calls a layer what takes transformers' modules 60: queries, keys and values come of one product, gate
    and up of another. The weights are shared with `model` until `lay_out`; whoever calls it lets go of the model first.
    """

    def __init__(self, model: nn.Module, slots: int, window: int, windows: dict[int, int | None]):
        body = model.model
        attention = body.layers[0].self_attn
        self._head_size = attention.head_dim
        self._heads = attention.q_proj.out_features // self._head_size
        self._kv_heads = attention.k_proj.out_features // self._head_size
        self._embedding = body.embed_tokens.weight.detach()
        self._rotary = body.rotary_emb
        self._activation = body.layers[0].mlp.act_fn
        self._norm = _Norm(body.norm.weight, body.norm.variance_epsilon)
        self._head = _joined(model.lm_head)
        shape = (2, slots, self._kv_heads, window, self._head_size)
        self._layers = [
            _Layer(
                _Norm(layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon),
                _joined(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                _joined(layer.self_attn.o_proj),
                _Norm(layer.post_attention_layernorm.weight, layer.post_attention_layernorm.variance_epsilon),
                _joined(layer.mlp.gate_proj, layer.mlp.up_proj),
                _joined(layer.mlp.down_proj),
                layer.self_attn.scaling,
                windows[number],
                zeros(shape, self._embedding.dtype, self._embedding.device),
            )
            for number, layer in enumerate(body.layers)
        ]

    @staticmethod
    def suits(model: nn.Module) -> bool:
        """Whether a model has the parts, and no others. Whether they do the same, its logits tell."""
        body = getattr(model, "model", None)
        if _parts(model) != {"model", "lm_head"} or _parts(body) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            return False
        parts = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
        return all(
            _parts(layer) == parts
            and _parts(layer.self_attn) == {"q_proj", "k_proj", "v_proj", "o_proj"}
            and _parts(layer.mlp) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
            and hasattr(layer.self_attn, "scaling")
            and hasattr(layer.self_attn, "head_dim")
            and hasattr(layer.input_layernorm, "variance_epsilon")
            and len({layer.self_attn.get_submodule(name).bias is None for name in ("q_proj", "k_proj", "v_proj")}) == 1
            for layer in body.layers
        )

    def lay_out(self, form: type[Packed] | type[Int8]) -> None:
        """Gives every linear layer another form, and lets their weights go."""
        self._head, self._embedding = _as(form, self._head), self._embedding.clone()  # see `pack`
        for number, layer in enumerate(self._layers):
            linears = {name: _as(form, getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")}
            self._layers[number] = layer._replace(**linears)

    def __call__(self, tokens: torch.Tensor, step: Step, logits_to_keep: int) -> torch.Tensor:
        """tokens: int64 [rows, q] → [rows, logits_to_keep, vocab], the logits after the last of them; 0: all."""
        rows, length = tokens.shape
        heads, kv_heads, half = self._heads, self._kv_heads, self._head_size // 2
        heads_shape = (rows, length, heads + 2 * kv_heads, self._head_size)
        kv_shape = (rows, length, 2, kv_heads, self._head_size)
        x = F.embedding(tokens, self._embedding)
        cos, sin = self._angles(x, step.positions)
        for input_norm, qkv_of, out_of, norm, gate_up_of, down_of, scaling, window, store in self._layers:
            qkv = qkv_of(input_norm(x)).view(heads_shape)
            qkv = torch.addcmul(qkv * cos, torch.roll(qkv, half, -1), sin)
            key, value = step.write(store, qkv[:, :, heads:].view(kv_shape))
            out = attend(step, qkv[:, :, :heads].transpose(1, 2), key, value, scaling, window)
            x = x + out_of(out.transpose(1, 2).reshape(rows, length, -1))
            gate, up = gate_up_of(norm(x)).chunk(2, -1)
            x = x + down_of(self._activation(gate).mul_(up))
        return self._head(self._norm(x[:, -logits_to_keep:]))

    def _angles(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, [rows, q, query, key and value heads, head size], that turn a token's queries and keys by its
        position when `x` and `x` rolled by half a head are multiplied with them, and leave its values as they are."""
        cos, sin = self._rotary(x, position_ids=positions)
        half = self._head_size // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        turned, left = self._heads + self._kv_heads, (*positions.shape, self._kv_heads, self._head_size)
        cos, sin = (t[:, :, None].expand(-1, -1, turned, -1) for t in (cos, sin))
        return torch.cat((cos, cos.new_ones(left)), 2), torch.cat((sin, sin.new_zeros(left)), 2)


def _parts(module: nn.Module | None) -> set[str]:
    return {name for name, _ in module.named_children()} if isinstance(module, nn.Module) else set()


def _joined(*linears: nn.Linear) -> functools.partial:
    """A linear layer that gives what all of them give, side by side; its weight is theirs from now on."""
    weight, bias = linears[0].weight.detach(), linears[0].bias
    if len(linears) > 1:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = None if bias is None else torch.cat([linear.bias for linear in linears])
        for linear, part in zip(linears, weight.split([linear.out_features for linear in linears])):
            linear.weight = nn.Parameter(part, requires_grad=False)
    return functools.partial(F.linear, weight=weight, bias=bias if bias is None else bias.detach())


def _as(form: type[Packed] | type[Int8], linear: functools.partial) -> Callable[[torch.Tensor], torch.Tensor]:
    return form(**linear.keywords).forward  # the method itself: calling a module costs as much as a small product
