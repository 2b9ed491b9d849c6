"""A model of PyTorch as an OpenVINO graph with placeholders for attention and recurrent layers, of which
`graph.py` makes paged operations when the graph is read.

transformers computes attention by a function that it looks up by the name of an implementation, and
convolutions and recurrences by functions that its modeling modules look up in their globals: while a model is
traced, these make placeholders.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch.nn.functional import silu, softplus
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.cache import NotConverted
from models.checkpoint.pretrained import (
    embed,
    has_grid_positions,
    is_causal_convolution,
    positions,
)
from models.openvino.graph import IMAGE_INPUTS, placeholder
from run import Json

import openvino as ov  # isort: skip
from openvino import opset13 as ops  # isort: skip
from openvino.frontend.pytorch import ConversionExtension, ModuleExtension, patch_model  # isort: skip
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder  # isort: skip

PLACEHOLDERS = "openvino_placeholder"  # the name of an attention function of transformers


class Placeholder(torch.nn.Module):
    """Stands for one layer's attention, convolution or recurrence while the model is traced; returns any
    [tokens, width].

    layer: what the placeholder's name in the graph holds. Its `weights` says how many of the last operands
    are weights, of one row; the other operands are [tokens, any width]. width: of the result.
    """

    def __init__(self, layer: Json, width: int):
        super().__init__()
        self.layer = layer
        self.name = str(layer)  # while the model is traced
        self.width = width

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        return operands[0][:, :1].expand(-1, self.width) * 1.0

    def in_graph(self, context) -> list[ov.Output]:
        """Returns the output of this placeholder in the graph, as a list of one; OpenVINO calls it when it
        comes to the module. Weights are added to a column of the tokens, which gives them as many rows."""
        operands = [context.get_input(i) for i in range(context.get_input_size())]
        column = ops.slice(operands[0], [0], [1], [1], [1])
        first = len(operands) - self.layer["weights"]
        operands[first:] = (ops.add(column, weight) for weight in operands[first:])
        return [placeholder(self.layer, operands, self.width)]


class PlaceholderFunctions:
    """The functions for attention, convolutions and recurrences that a model calls while it is traced. The
    first call in a layer makes a placeholder, and stores it in the layer's module; `placeholders` has all of
    them, in the order of these calls. To be used for one model at a time: the constructor registers
    PLACEHOLDERS as the name of this object's attention."""

    def __init__(self, model: torch.nn.Module):
        self.placeholders: list[Placeholder] = []
        self._model = model
        self._module: torch.nn.Module  # whose forward runs
        ALL_ATTENTION_FUNCTIONS.register(PLACEHOLDERS, self._attend)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """A context manager. While the body runs, replaces the functions of convolutions and recurrences in
        the globals of the modeling modules whose layers have convolutions. Attention is not replaced: the
        model has to be set to the implementation PLACEHOLDERS."""
        functions = {
            "causal_conv1d_fn": self._convolve,
            "torch_chunk_gated_delta_rule": self._delta_rule,
            "mamba2_chunk_scan": self._scan,
            "mamba_selective_scan": self._scan_by_channel,
        }
        with contextlib.ExitStack() as undo:
            for module in self._model.modules():
                if not any(is_causal_convolution(child) for child in module.children()):
                    continue
                hook = module.register_forward_pre_hook(self._enter)
                undo.callback(hook.remove)
                modeling = vars(sys.modules[type(module).__module__])
                for name in functions.keys() & modeling.keys():
                    undo.callback(modeling.__setitem__, name, modeling[name])
                    modeling[name] = functions[name]
            yield

    def _enter(self, module: torch.nn.Module, _arguments) -> None:
        """Remembers the module whose forward runs: transformers' functions do not say which layer calls
        them."""
        self._module = module

    def _run(self, facts: Json, width: int, operands: list[torch.Tensor]) -> torch.Tensor:
        """Runs the placeholder of the module whose forward runs, and returns its result, [tokens, width],
        whose numbers mean nothing. The first call makes the placeholder.

        facts: the `layer` of the Placeholder; without an index they get the number of the placeholder. width:
        as Placeholder takes it. operands: [tokens, any width], then the weights, [1, any width].
        """
        name = f"{facts['kind']}_placeholder"
        if not hasattr(self._module, name):
            self.placeholders.append(Placeholder({"index": len(self.placeholders), **facts}, width))
            setattr(self._module, name, self.placeholders[-1])
        return getattr(self._module, name)(*operands)

    def _attend(
        self,
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=None,
        sliding_window=None,
        softcap=None,
        s_aux=None,
        **_,
    ):
        """Stands for the attention function of transformers. query: [1, heads, tokens, head size]; key and
        value may have fewer heads, and value another size. The mask is not read: the graph's attention is
        causal, within `sliding_window` tokens. Returns [1, tokens, heads, value size] and None, in the place
        of weights. Raises NotConverted for capped scores."""
        if softcap is not None:
            raise NotConverted("its attention caps scores")
        self._module = module
        _, heads, _, size = query.shape
        _, kv_heads, _, value_size = value.shape
        facts = {
            "kind": "attention",
            "index": module.layer_idx,
            "scaling": float(size**-0.5 if scaling is None else scaling),
            "window": int(sliding_window or 0),
            "kv_heads": kv_heads,
            "key_size": size,
            "value_size": value_size,
            "sinks": [] if s_aux is None else s_aux.tolist(),
            "weights": 0,
        }
        flat = [states.transpose(1, 2).flatten(2)[0] for states in (query, key, value)]
        return self._run(facts, heads * value_size, flat).reshape(1, -1, heads, value_size), None

    def _convolve(self, hidden_states, weight, bias=None, activation=None, **_):
        """Stands for a causal convolution. hidden_states: [1, channels, tokens]; weight: [channels, kernel].
        Returns [1, channels, tokens], after the activation of this name, if there is one."""
        channels, kernel = weight.shape
        weights = [weight.reshape(1, -1)] + ([] if bias is None else [bias[None]])
        facts = {"kind": "conv", "channels": channels, "kernel": kernel, "weights": len(weights)}
        tokens = self._run(facts, channels, [hidden_states[0].T, *weights])
        convolved = tokens.T[None]
        return convolved if activation is None else ACT2FN[activation](convolved)

    def _delta_rule(self, query, key, value, g, beta, **_):
        """Stands for the gated delta rule. query, key: [1, tokens, heads, key size], not normalized yet;
        value: [1, tokens, heads, value size]; g, the logarithm of the decay, and beta: [1, tokens, heads].
        Returns [1, tokens, heads, value size] and None, in the place of the state."""
        heads, value_size = value.shape[2:]
        facts = {
            "kind": "delta",
            "heads": heads,
            "key_size": query.shape[3],
            "value_size": value_size,
            "weights": 0,
        }
        operands = [part[0].flatten(1) for part in (query, key, value, g, beta)]
        mixed = self._run(facts, heads * value_size, operands)
        return mixed.reshape(1, -1, heads, value_size), None

    def _scan(self, hidden_states, dt, A, B, C, D, dt_bias, dt_limit, **_):
        """Stands for the scan of Mamba 2. hidden_states: [1, tokens, heads, size]; dt: [1, tokens, heads],
        without its bias and softplus; A, D, dt_bias: [heads]; B, C: [1, tokens, groups, state size]. Returns
        [1, tokens, heads, size]. All but the recurrence, such as D and the bias of dt, becomes ordinary
        operations of the graph."""
        heads, size = hidden_states.shape[2:]
        groups, state_size = B.shape[2:]
        dt = softplus(dt + dt_bias)
        if tuple(dt_limit) != (0.0, float("inf")):
            dt = dt.clamp(*dt_limit)
        facts = {
            "kind": "scan",
            "heads": heads,
            "size": size,
            "groups": groups,
            "state_size": state_size,
            "weights": 1,
        }
        operands = [hidden_states[0].flatten(1), dt[0], B[0].flatten(1), C[0].flatten(1), A[None]]
        mixed = self._run(facts, heads * size, operands).reshape(1, -1, heads, size)
        return mixed + hidden_states * D[:, None]

    def _scan_by_channel(self, hidden_states, dt, A, B, C, D, z, delta_bias, **_):
        """Stands for the scan of Mamba 1. hidden_states, dt, z: [1, channels, tokens], dt without its bias
        and softplus; A: [channels, state size]; B, C: [1, state size, tokens]; D, delta_bias: [channels].
        Returns [1, channels, tokens]. All but the recurrence, such as D and the gate z, becomes ordinary
        operations of the graph."""
        dt = softplus(dt + delta_bias[:, None])
        channels, state_size = A.shape
        facts = {"kind": "scan_by_channel", "channels": channels, "state_size": state_size, "weights": 1}
        operands = [*(part[0].T for part in (hidden_states, dt, B, C)), A.T.reshape(1, -1)]
        mixed = self._run(facts, channels, operands).T[None]
        return (mixed + hidden_states * D[:, None]) * silu(z)


class _Flat(torch.nn.Module):
    """A model that takes tokens without rows, and returns logits, [rows, vocab].

    input_ids, position_ids: int64 [tokens] of all chunks; position_ids: [3, tokens] where
    `has_grid_positions` says so. keep: int64 [rows], which tokens' logits are returned. For models that read
    images also image_embeddings: float32 [image tokens, width], and image_places: int64 [image tokens], the
    places of the image tokens among all tokens.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids, keep, *images):
        tokens = embed(self.model, input_ids[None], *images) if images else {"input_ids": input_ids[None]}
        return self.model(
            **tokens,
            **positions(self.model, position_ids.unsqueeze(-2)),
            use_cache=False,
            logits_to_keep=keep,
        ).logits[0]


def trace(model: torch.nn.Module, image_width: int | None = None) -> ov.Model:
    """Returns the model as a graph with placeholders: inputs as `_Flat` takes them, by these names, and
    logits [rows, vocab] as its output. image_width: of the embeddings of images; None: the graph reads no
    images.

    Changes the torch model, which cannot be used afterwards. Raises NotConverted for layers that do not use
    transformers' attention interface and for capped scores, and what OpenVINO or the model raises.
    """
    functions = PlaceholderFunctions(model)
    model.requires_grad_(False).set_attn_implementation(PLACEHOLDERS)
    # The other implementations do not convert, or break where an expert has no token.
    model.set_experts_implementation("batched_mm")
    ids = torch.arange(5)
    with torch.no_grad(), functions.replaced():
        model(input_ids=ids[None], use_cache=False, **positions(model, ids[None]))  # makes the placeholders
        layers = model.config.get_text_config().num_hidden_layers
        kinds = {each.layer["kind"] for each in functions.placeholders}
        if kinds <= {"attention"} and len(functions.placeholders) != layers:
            raise NotConverted("its layers do not use the attention interface of transformers")
        for module in model.modules():
            if hasattr(module, "original_inv_freq"):  # longrope: one buffer of two names cannot be traced
                module.inv_freq = torch.nn.Buffer(module.inv_freq.clone(), persistent=False)
            if hasattr(module, "dt_proj"):  # whose weights Mamba's layers multiply by without calling it
                module.dt_proj.float()
        # 16-bit constants in a float32 graph; else the angles are computed in 16 bits, too.
        if model.dtype != torch.float32:
            getattr(patch_model, "__make_16bit_traceable")(model)
        inputs = {"input_ids": (ids, [-1]), "position_ids": (ids, [-1]), "keep": (ids[2:4], [-1])}
        if image_width:
            if has_grid_positions(model):
                inputs["position_ids"] = (ids.repeat(3, 1), [3, -1])
            embeddings = (torch.zeros(2, image_width), [-1, image_width])
            inputs |= zip(IMAGE_INPUTS, (embeddings, (ids[1:3], [-1])))
        example = tuple(each for each, _shape in inputs.values())
        modules = {each: ModuleExtension(each, each.name) for each in functions.placeholders}
        traced = TorchScriptPythonDecoder(
            _Flat(model),
            example_input=example,
            module_extensions=modules,
            trace_kwargs={"check_trace": False},
        )
        in_graph = [ConversionExtension(each.name, each.in_graph) for each in functions.placeholders]
        graph = ov.convert_model(traced, example_input=example, extension=in_graph)
    for (name, (each, shape)), port in zip(inputs.items(), graph.inputs):
        port.get_node().set_element_type(ov.Type.f32 if each.is_floating_point() else ov.Type.i64)
        port.get_node().set_partial_shape(ov.PartialShape(shape))
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    return graph
