"""Vision towers and their projectors in plain torch, from the tensors of a checkpoint.

CLIP, SigLIP, InternViT and Pixtral, as LLaVA, Idefics 3, InternVL, Mistral Small 3, LightOnOCR, Gemma 3 and
PaddleOCR-VL use them; and those of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and GLM-OCR.

Needs no transformers, whose classes differ between the versions of the engines. `openvino/convert.py`
traces a tower into an OpenVINO graph and compares it with transformers; `pytorch/model.py` runs it.
`embeddings.py` puts the tiles of an image together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from manifest import Manifest, VisionFamily
from models.images.embeddings import encode_tiles
from run import Json

# Where checkpoints have the parts: transformers renamed them more than once. The longer names come first.
TOWERS = (
    "model.vision_tower.vision_model.",
    "vision_tower.vision_model.",
    "model.vision_tower.",
    "vision_tower.",
    "model.vision_model.",
    "model.visual.vision_model.",
    "model.visual.",
    "visual.",
    "model.vision_encoder.",
    "vision_encoder.",
)
PROJECTORS = (
    "model.multi_modal_projector.",
    "multi_modal_projector.",
    "model.connector.",
    "model.projector.",
    "model.vision_projection.",
    "vision_projection.",
)
NEWLINES = ("model.image_newline", "image_newline")

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [1, 1, patches, head size]


class VisionTower(nn.Module):
    """Reads a tile, uint8 RGB [1, height, width, 3], and returns the embeddings of its tokens, float32
    [tokens, width of the language model]. `make_tower` makes one.

    tensors: by their names in the checkpoint, or those of transformers' model; dtype: of the arithmetic, if
    not that of the tensors. Raises KeyError for a part that is missing.
    """

    # Pixels of a tile's side; None: tiles have any size, a multiple of `token_side`.
    tile_side: int | None = None
    token_side: int

    def __init__(self, manifest: Manifest, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None):
        super().__init__()
        self._config = {**manifest.vision_family.defaults, **manifest.config_json}
        self._vision = manifest.vision_config
        self._tower = _Tensors(tensors, TOWERS, dtype)
        newline = next((tensors[name] for name in NEWLINES if name in tensors), None)
        self.register_buffer("newline", newline)  # [width]: the embedding after each row of a canvas
        scale, shift = _normalization(manifest.processor_config)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    @torch.inference_mode()
    def encode(
        self, pixels: np.ndarray, canvas: tuple[int, ...], is_cancelled: Callable[[], bool]
    ) -> np.ndarray | None:
        """As `encode_image` of StaticBatchModel (base.py)."""
        newline = None if self.newline is None else self.newline.float().cpu().numpy()
        return encode_tiles(self._run, pixels, canvas, newline, is_cancelled)

    def _run(self, tile: np.ndarray) -> np.ndarray:
        return self(torch.tensor(tile, device=self.scale.device)).cpu().numpy()

    def normalize(self, tiles: Tensor) -> Tensor:
        """The values of pixels, uint8 [tiles, height, width, 3] -> float32 [tiles, 3, height, width]."""
        return (tiles.float() * self.scale - self.shift).permute(0, 3, 1, 2)

    def for_transformers(self, values: Tensor) -> Tensor:
        """What transformers' model takes for the tiles of an image, of which `normalize` made `values`."""
        return values

    @staticmethod
    def adapt(model: nn.Module) -> None:
        """Changes transformers' model of the family where this server needs another computation."""


class ProjectedTower(VisionTower):
    """A tower of transformers' vision models, whose output a projector reads. The names of their tensors tell
    which ones they are."""

    def __init__(self, manifest: Manifest, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None):
        super().__init__(manifest, tensors, dtype)
        vision = self._vision
        tower = self._tower
        self._projector = _Tensors(tensors, PROJECTORS, dtype)
        self._is_pixtral = "patch_conv.weight" in tower
        self._is_internvit = "embeddings.cls_token" in tower
        self._is_idefics = "modality_projection.proj.weight" in self._projector
        # Their names in CLIP and SigLIP; InternViT and Pixtral have others.
        self._patches = "embeddings.patch_embedding"
        self._first_token = "embeddings.class_embedding"
        self._positions = "embeddings.position_embedding.weight"
        self._layers = "encoder.layers"
        self._final_norm = "post_layernorm"
        if self._is_pixtral:
            self._patches = "patch_conv"
            self._layers = "transformer.layers"
        elif self._is_internvit:
            self._patches = "embeddings.patch_embeddings.projection"
            self._first_token = "embeddings.cls_token"
            self._positions = "embeddings.position_embeddings"
            self._layers = "encoder.layer"
            self._final_norm = "layernorm"
        self._heads = vision["num_attention_heads"]
        self._activation = ACTIVATIONS[vision["hidden_act"]]
        # transformers does not read Pixtral's.
        self._epsilon = 1e-5 if self._is_pixtral else vision["layer_norm_eps"]
        self._uses_rms = vision.get("norm_type") == "rms_norm"
        self._layer_count = vision["num_hidden_layers"]
        self._patch_side = tower[f"{self._patches}.weight"].shape[-1]
        self._merge = self._config.get("spatial_merge_size") or vision.get("spatial_merge_size", 1)
        self.token_side = self._patch_side * self._merge
        self.tile_side = None if self._is_pixtral else vision["image_size"]
        self._selected = self._config.get("vision_feature_layer")
        self._drops_first = self._config.get("vision_feature_select_strategy") == "default"

    def forward(self, tile: Tensor) -> Tensor:
        grid = self._grid(tile)
        rows, columns = grid.shape[2], grid.shape[3]
        x = grid.flatten(2).transpose(1, 2)
        features = self._pixtral(x, rows, columns) if self._is_pixtral else self._transformer(x)
        if self._drops_first:
            features = features[:, 1:]
        return self._project(features[0], rows, columns).float()

    def _grid(self, tile: Tensor) -> Tensor:
        """The patches of a tile, [1, width, rows, columns]."""
        name = self._patches
        patches = self._tower[f"{name}.weight"]
        values = self.normalize(tile).to(patches.dtype)
        return F.conv2d(values, patches, self._tower.get(f"{name}.bias"), stride=self._patch_side)

    # The towers. x: [1, patches, width]; the result: [1, tokens, width], or that of several layers, joined.

    def _transformer(self, x: Tensor) -> Tensor:
        tower = self._tower
        if self._first_token in tower:
            x = torch.cat([tower[self._first_token].view(1, 1, -1), x], 1)
        x = x + tower[self._positions]
        if "pre_layrnorm.weight" in tower:  # its name in CLIP
            x = tower.layer_norm(x, "pre_layrnorm", self._epsilon)
        reads_all = self._selected is None or (self._is_internvit and self._selected == -1)
        states = self._states(x, -1 if reads_all else self._selected, self._layer)
        if reads_all and f"{self._final_norm}.weight" in tower:
            states = tower.layer_norm(states, self._final_norm, self._epsilon)
        return states

    def _pixtral(self, x: Tensor, rows: int, columns: int) -> Tensor:
        rotation = self._rotation(x, rows, columns)

        def layer(x: Tensor, n: int) -> Tensor:
            return self._pixtral_layer(x, n, rotation)

        return self._states(self._tower.rms_norm(x, "ln_pre", self._epsilon), self._selected, layer)

    def _rotation(self, x: Tensor, rows: int, columns: int) -> Rotation:
        width = x.shape[-1] // self._heads
        theta = (self._vision.get("rope_parameters") or self._vision).get("rope_theta", 10_000.0)
        frequencies = theta ** -(torch.arange(0, width, 2, device=x.device).float() / width)
        down = frequencies[::2]
        across = frequencies[1::2] if self._is_pixtral else down
        angles = _angles(rows, columns, down, across).flatten(0, 1)[None, None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def _states(self, x: Tensor, selected: int | list[int], layer: Any) -> Tensor:
        """Runs the layers, and joins the selected states: 0 is that before the first one."""
        count = self._layer_count
        wanted = [n % (count + 1) for n in (selected if isinstance(selected, list) else [selected])]
        states = [x]
        for n in range(max(wanted)):
            states.append(layer(states[-1], n))
        return torch.cat([states[n] for n in wanted], -1)

    def _layer(self, x: Tensor, n: int, rotation: Rotation | None = None) -> Tensor:
        tower = self._tower
        at = f"{self._layers}.{n}"
        if self._is_internvit:
            norms = ("layernorm_before", "layernorm_after")
            attention, out = "attention", "projection_layer"
            scales = (tower[f"{at}.lambda_1"], tower[f"{at}.lambda_2"])
        else:
            norms = ("layer_norm1", "layer_norm2")
            attention, out = "self_attn", "out_proj"
            scales = (1, 1)
        normed = self._norm(x, f"{at}.{norms[0]}")
        x = x + scales[0] * self._attend(normed, f"{at}.{attention}", out, rotation)
        hidden = tower.linear(self._norm(x, f"{at}.{norms[1]}"), f"{at}.mlp.fc1")
        return x + scales[1] * tower.linear(self._activation(hidden), f"{at}.mlp.fc2")

    def _pixtral_layer(self, x: Tensor, n: int, rotation: Rotation) -> Tensor:
        tower = self._tower
        at = f"{self._layers}.{n}"
        normed = tower.rms_norm(x, f"{at}.attention_norm", self._epsilon)
        x = x + self._attend(normed, f"{at}.attention", "o_proj", rotation)
        normed = tower.rms_norm(x, f"{at}.ffn_norm", self._epsilon)
        gate = self._activation(tower.linear(normed, f"{at}.feed_forward.gate_proj"))
        up = tower.linear(normed, f"{at}.feed_forward.up_proj")
        return x + tower.linear(gate * up, f"{at}.feed_forward.down_proj")

    def _attend(self, x: Tensor, at: str, out: str, rotation: Rotation | None = None) -> Tensor:
        tower = self._tower
        query, key, value = (tower.linear(x, f"{at}.{name}_proj") for name in "qkv")
        if f"{at}.q_norm.weight" in tower:
            query = tower.rms_norm(query, f"{at}.q_norm", 1e-6)
            key = tower.rms_norm(key, f"{at}.k_norm", 1e-6)
        heads = [each.unflatten(-1, (self._heads, -1)).transpose(1, 2) for each in (query, key, value)]
        if rotation:
            heads[:2] = (_rotate(each, *rotation) for each in heads[:2])
        attended = F.scaled_dot_product_attention(*heads)
        return tower.linear(attended.transpose(1, 2).flatten(2), f"{at}.{out}")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        norm = self._tower.rms_norm if self._uses_rms else self._tower.layer_norm
        return norm(x, name, self._epsilon)

    def _project(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """x: [patches, width] -> [tokens, width of the language model]."""
        projector = self._projector
        config = self._config
        if self._is_idefics:
            joined = _join(x, rows, columns, config.get("scale_factor", 2)).flatten(1)
            return projector.linear(joined, "modality_projection.proj")
        if "mm_input_projection_weight" in projector:  # Gemma
            side = math.isqrt(config.get("mm_tokens_per_image", 256))
            pooled = F.avg_pool2d(x.t().view(1, -1, rows, columns), rows // side)
            x = projector.rms_norm(pooled[0].flatten(1).t(), "mm_soft_emb_norm", self._epsilon, offset=1.0)
            return x @ projector["mm_input_projection_weight"]
        if "layer_norm.weight" in projector:  # InternVL
            joined = _join(x, rows, columns, round(1 / config.get("downsample_ratio", 0.5))).flatten(1)
            x = projector.layer_norm(joined, "layer_norm", 1e-5)
        if "patch_merger.merging_layer.weight" in projector:  # Mistral Small, LightOnOCR
            x = projector.rms_norm(x, "norm", config["text_config"].get("rms_norm_eps", 1e-6))
            joined = _join(x, rows, columns, self._merge)
            x = projector.linear(joined.transpose(1, 2).flatten(1), "patch_merger.merging_layer")
        activation = ACTIVATIONS[config.get("projector_hidden_act", "gelu")]
        return projector.linear(activation(projector.linear(x, "linear_1")), "linear_2")

    def for_transformers(self, values: Tensor) -> Tensor:
        return values if self.newline is None and not self._is_idefics else values[None]

    @staticmethod
    def adapt(model: nn.Module) -> None:
        """transformers scales Granite's logits in its text model alone, not in those of LLaVA."""
        if scaling := getattr(model.config.get_text_config(), "logits_scaling", None):
            head = model.get_output_embeddings()
            head.register_forward_hook(lambda _head, _inputs, logits: logits / scaling)


class PaddleTower(ProjectedTower):
    """The tower of PaddleOCR-VL: SigLIP over an image of any size, for which its table of positions is
    scaled, with rotary positions as well."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.tile_side = None

    def forward(self, tile: Tensor) -> Tensor:
        grid = self._grid(tile)
        rows, columns = grid.shape[2], grid.shape[3]
        # See `adapt`.
        x = grid + _scaled_positions(self._tower[self._positions], rows, columns, align_corners=False)
        x = x.flatten(2).transpose(1, 2)
        rotation = self._rotation(x, rows, columns)
        for n in range(self._layer_count):
            x = self._layer(x, n, rotation)
        x = self._tower.layer_norm(x[0], self._final_norm, self._epsilon)
        x = self._projector.layer_norm(x, "pre_norm", 1e-5)
        return self._project(_join(x, rows, columns, self._merge).flatten(1), rows, columns).float()

    def for_transformers(self, values: Tensor) -> Tensor:
        """[1, 3, height, width] -> [patches, 3, side, side], row by row."""
        side = self._patch_side
        blocks = values[0].unflatten(2, (-1, side)).unflatten(1, (-1, side))
        return blocks.permute(1, 3, 0, 2, 4).flatten(0, 1)

    @staticmethod
    def adapt(model: nn.Module) -> None:
        """It was trained with positions that are interpolated without aligned corners, as in transformers
        5.0, vLLM and the code on the hub; transformers 5.20 aligns them."""
        model.model.visual.vision_model.embeddings.interpolation_align_corners = False


class _Attended(NamedTuple):
    """Which patches attend to each other: those of a window, of several windows of one size or one of all."""

    cos: Tensor  # of their rotary positions, [windows, 1, places, head size]
    sin: Tensor
    source: Tensor | None = None  # which patch is at each place, int64 [windows * places]; None: in order
    places: Tensor | None = None  # where each patch is, int64 [patches]
    is_patch: Tensor | None = None  # whether there is one, bool [windows, 1, 1, places]; None: everywhere


class QwenTower(VisionTower):
    """The tower of Qwen2-VL, of Qwen2.5-VL, some of whose layers attend within windows, of Qwen3-VL and
    of Qwen3.5. In Qwen3-VL the embeddings that the first layers of the language model add (DeepStack) follow
    on the others: [tokens, (1 + layers) * width]."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        vision = self._vision
        self._heads = vision.get("num_heads", 16)
        self._merge = vision.get("spatial_merge_size", 2)
        self._patch_side = self._tower["patch_embed.proj.weight"].shape[-1]
        self.token_side = self._patch_side * self._merge
        self._layer_count = self._tower.count("blocks")
        self._epsilon = vision.get("rms_norm_eps", 1e-6)
        self._activation = ACTIVATIONS[vision["hidden_act"]]
        # Tokens along a side; 0: all layers attend to the whole image.
        self._window = vision.get("window_size", 0) // self.token_side
        self._whole: Sequence[int] = vision.get("fullatt_block_indexes", ())
        self._deepstack: Sequence[int] = vision.get("deepstack_visual_indexes", ())  # layers that are read
        # The names of a layer's MLP and of the merger's parts.
        self._mlp_names = ("fc1", "fc2")
        self._merger_names = ("ln_q", "mlp.0", "mlp.2")
        if "merger.linear_fc1.weight" in self._tower:
            self._mlp_names = ("linear_fc1", "linear_fc2")
            self._merger_names = ("norm", *self._mlp_names)

    def forward(self, tile: Tensor) -> Tensor:
        tower = self._tower
        weight = tower["patch_embed.proj.weight"].sum(2)  # an image is a film of equal frames
        values = self.normalize(tile).to(weight.dtype)
        grid = F.conv2d(values, weight, tower.get("patch_embed.proj.bias"), stride=self._patch_side)
        rows, columns = grid.shape[2], grid.shape[3]
        if "pos_embed.weight" in tower:
            grid = grid + _scaled_positions(tower["pos_embed.weight"], rows, columns, align_corners=True)
        x = self._by_token(grid[0].permute(1, 2, 0))
        cos, sin = self._rotation(rows, columns, x)
        image = _Attended(cos, sin)
        windows = self._windows(rows // self._merge, columns // self._merge, image) if self._window else image
        deepstack = []
        for n in range(self._layer_count):
            at = f"blocks.{n}"
            attended = windows if self._window and n not in self._whole else image
            x = x + self._attend(self._norm(x, f"{at}.norm1"), at, attended)
            x = x + self._mlp(self._norm(x, f"{at}.norm2"), f"{at}.mlp")
            if n in self._deepstack:
                merger = f"deepstack_merger_list.{len(deepstack)}"
                deepstack.append(self._merged(self._joined(x), merger))
        merged = self._merged(x, "merger")
        return torch.cat([merged, *deepstack], -1).float()

    def for_transformers(self, values: Tensor) -> Tensor:
        """[1, 3, height, width] -> a row for each patch, of two equal frames; those of a token together."""
        block = (-1, self._merge, self._patch_side)
        blocks = values[0].unflatten(2, block).unflatten(1, block)
        patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)
        return patches.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1)

    @staticmethod
    def adapt(model: nn.Module) -> None:
        """Lets the first layers of Qwen3-VL's text model add the `deepstack` of `embed` (pretrained.py).
        transformers' own way selects tokens by a mask, which cannot be traced."""

        def add(n: int, _layer: nn.Module, _inputs: tuple, arguments: dict[str, Any], output: Tensor):
            return output + arguments["deepstack"][n] if "deepstack" in arguments else output

        for n in range(len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))):
            hook = functools.partial(add, n)
            model.get_decoder().layers[n].register_forward_hook(hook, with_kwargs=True)

    def _by_token(self, grid: Tensor) -> Tensor:
        """[rows, columns, width] -> [patches, width], those of a token together."""
        merge = self._merge
        rows, columns, width = grid.shape
        blocks = grid.reshape(rows // merge, merge, columns // merge, merge, width)
        return blocks.transpose(1, 2).reshape(-1, width)

    def _rotation(self, rows: int, columns: int, x: Tensor) -> Rotation:
        size = x.shape[-1] // self._heads // 2
        frequencies = 10_000.0 ** -(torch.arange(0, size, 2, device=x.device).float() / size)
        angles = self._by_token(_angles(rows, columns, frequencies, frequencies))[None, None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def _windows(self, rows: int, columns: int, image: _Attended) -> _Attended:
        """The windows of an image of so many tokens. All have the same size: those at its edges have places
        without a patch."""
        side = self._window
        patches = self._merge**2
        size = side**2 * patches
        across = (columns + side - 1) // side
        count = (rows + side - 1) // side * across
        # Whole numbers throughout: in bfloat16 larger ones than 256 would be rounded.
        place = torch.arange(count * size, device=self.scale.device)
        window, token = place // size, place % size // patches
        y = window // across * side + token // side
        x = window % across * side + token % side
        is_patch = (y < rows) & (x < columns)
        source = torch.where(is_patch, (y * columns + x) * patches + place % patches, 0)
        patch = torch.arange(rows * columns * patches, device=self.scale.device)
        y = patch // patches // columns
        x = patch // patches % columns
        token = y % side * side + x % side
        places = (y // side * across + x // side) * size + token * patches + patch % patches
        shape = (-1, 1, size, image.cos.shape[-1])
        return _Attended(
            image.cos[0, 0, source].view(shape),
            image.sin[0, 0, source].view(shape),
            source,
            places,
            is_patch.view(-1, 1, 1, size),
        )

    def _attend(self, x: Tensor, at: str, within: _Attended) -> Tensor:
        joined = self._tower.linear(x, f"{at}.attn.qkv")
        width = joined.shape[-1] // 3
        if within.source is not None:
            joined = joined[within.source]
        windows, _, places, size = within.cos.shape
        heads = joined.view(windows, places, 3, self._heads, size)
        # [windows, heads, places, size]
        query, key, value = (each.transpose(1, 2) for each in heads.unbind(2))
        if f"{at}.attn.q_norm.weight" in self._tower:
            query = self._norm(query, f"{at}.attn.q_norm")
            key = self._norm(key, f"{at}.attn.k_norm")
        query, key = (_rotate(each, within.cos, within.sin) for each in (query, key))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=within.is_patch)
        x = attended.transpose(1, 2).reshape(-1, width)
        if within.places is not None:
            x = x[within.places]
        return self._tower.linear(x, f"{at}.attn.proj")

    def _mlp(self, x: Tensor, at: str) -> Tensor:
        linear = self._tower.linear
        if f"{at}.gate_proj.weight" in self._tower:
            hidden = self._activation(linear(x, f"{at}.gate_proj")) * linear(x, f"{at}.up_proj")
            return linear(hidden, f"{at}.down_proj")
        first, second = self._mlp_names
        return linear(self._activation(linear(x, f"{at}.{first}")), f"{at}.{second}")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        has_bias = f"{name}.bias" in self._tower
        return (self._tower.layer_norm if has_bias else self._tower.rms_norm)(x, name, self._epsilon)

    def _merged(self, x: Tensor, at: str) -> Tensor:
        """[patches, width] -> [tokens, width of the language model]."""
        norm, first, second = (f"{at}.{name}" for name in self._merger_names)
        joined = self._joined(self._norm(x, norm))
        return self._tower.linear(F.gelu(self._tower.linear(joined, first)), second)

    def _joined(self, x: Tensor) -> Tensor:
        """[patches, width] -> [tokens, width of all patches of a token]."""
        return x.reshape(-1, self._merge**2 * self._tower["patch_embed.proj.weight"].shape[0])


class GlmTower(QwenTower):
    """The tower of GLM-OCR: a convolution makes a token of its patches, and a gated MLP follows."""

    def _merged(self, x: Tensor, at: str) -> Tensor:
        tower = self._tower
        weight = tower["downsample.weight"].permute(0, 2, 3, 1).flatten(1)  # in the order of `_joined`
        x = F.linear(self._joined(self._norm(x, "post_layernorm")), weight, tower["downsample.bias"])
        x = tower.layer_norm(tower.linear(x, f"{at}.proj"), f"{at}.post_projection_norm", 1e-5)
        return self._mlp(F.gelu(x), at)


def tower_class(family: VisionFamily) -> type[VisionTower]:
    return globals()[family.tower]


def make_tower(manifest: Manifest, *arguments: Any) -> VisionTower:
    """The tower of a model; the arguments are those of `VisionTower`."""
    return tower_class(manifest.vision_family)(manifest, *arguments)


class _Tensors(nn.Module):
    """The tensors below the first of some prefixes that there is, by the rest of their dotted names; and the
    layers that are made of them."""

    def __init__(self, tensors: Mapping[str, Tensor], prefixes: Iterable[str], dtype: torch.dtype | None):
        super().__init__()
        self._dtype = dtype
        for prefix in prefixes:
            names = [name for name in tensors if name.startswith(prefix)]
            if names:
                break
        else:
            raise KeyError(f"the checkpoint has no tensor {'..., '.join(prefixes)}...")
        for name in names:
            self.register_buffer(name.removeprefix(prefix).replace(".", "/"), tensors[name])

    def get(self, name: str) -> Tensor | None:
        if name not in self:
            return None
        return self[name]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._buffers[name.replace(".", "/")]
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def __contains__(self, name: str) -> bool:
        return name.replace(".", "/") in self._buffers

    def count(self, layers: str) -> int:
        """How many layers there are below a name."""
        begin = layers.replace(".", "/") + "/"
        return len(
            {name.removeprefix(begin).split("/")[0] for name in self._buffers if name.startswith(begin)}
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))

    def layer_norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        weight = self[f"{name}.weight"]
        return F.layer_norm(x, weight.shape, weight, self.get(f"{name}.bias"), epsilon)

    def rms_norm(self, x: Tensor, name: str, epsilon: float, offset: float = 0.0) -> Tensor:
        """`offset` is added to the weights."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return (self[f"{name}.weight"] + offset) * wide.to(x.dtype)


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision tower, the projector or the row ends."""
    return name.startswith((*TOWERS, *PROJECTORS, *NEWLINES))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint that `is_vision` names."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if is_vision(name):
                    tensors[name] = file.get_tensor(name)
    return tensors


def _normalization(preprocessor: Json) -> tuple[Tensor, Tensor]:
    """What pixels of 0 to 255 are multiplied by, and what is then subtracted, for each color."""
    factor = preprocessor.get("rescale_factor", 1 / 255) if preprocessor.get("do_rescale", True) else 1.0
    if not preprocessor.get("do_normalize", True):
        return torch.full((3,), factor), torch.zeros(3)
    mean, deviation = torch.tensor([preprocessor["image_mean"], preprocessor["image_std"]])
    return factor / deviation, mean / deviation


def _scaled_positions(table: Tensor, rows: int, columns: int, align_corners: bool) -> Tensor:
    """A table of learned positions in a square, [positions, width], for a grid of patches: [1, width, rows,
    columns]."""
    side = math.isqrt(table.shape[0])
    square = table.t().view(1, -1, side, side)
    return F.interpolate(square, size=(rows, columns), mode="bilinear", align_corners=align_corners)


def _angles(rows: int, columns: int, down: Tensor, across: Tensor) -> Tensor:
    """The angles of rotary positions in a grid of patches, [rows, columns, head size], of the frequencies of
    rows and columns, [head size / 4]."""
    y = torch.arange(rows, device=down.device).float()[:, None, None] * down
    z = torch.arange(columns, device=down.device).float()[None, :, None] * across
    shape = (rows, columns, down.shape[0])
    return torch.cat([y.expand(shape), z.expand(shape)] * 2, -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [1 or windows, heads, patches, head size]; cos, sin: [1 or windows, 1, patches, head size]. In these
    forms, with the axis given as 3, OpenVINO makes one operation of it."""
    first, second = x.chunk(2, 3)
    return x * cos + torch.cat([-second, first], -1) * sin


def _join(x: Tensor, rows: int, columns: int, by: int) -> Tensor:
    """by x by neighbors of a grid of patches, [rows * columns, width], become a token: [tokens, by * by,
    width]. What is left of a row or column of them is dropped."""
    grid = x.view(rows, columns, -1)[: rows // by * by, : columns // by * by]
    grid = grid.reshape(rows // by, by, columns // by, by, x.shape[-1])
    return grid.transpose(1, 2).reshape(-1, by * by, x.shape[-1])
