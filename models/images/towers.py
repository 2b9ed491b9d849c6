"""Vision towers and their projectors in plain torch, from the tensors of a checkpoint.

CLIP, SigLIP, InternViT and Pixtral, as LLaVA, Idefics 3, InternVL, Mistral Small 3, LightOnOCR, Gemma 3 and
PaddleOCR-VL use them; and those of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and GLM-OCR.

Uses no vision classes of transformers, which differ between the versions of the engines.
`openvino/convert.py` traces a tower into an OpenVINO graph and compares it with transformers;
`pytorch/model.py` runs it. `embeddings.py` puts the tiles of an image together."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers.activations import ACT2FN

from manifest import Manifest, VisionFamily
from models.images.embeddings import ImageEncoder
from run import Json

# Where checkpoints have the parts, as patterns: transformers renamed them more than once.
TOWER = r"(model\.)?(vision_tower|vision_model|visual|vision_encoder)\.(vision_model\.)?"
PROJECTOR = r"(model\.)?(multi_modal_projector|connector|projector|vision_projection)\."
NEWLINE = r"(model\.)?image_newline$"

# The names of parts of towers, as patterns, and those that they have here: CLIP's.
NAMES = {
    r"^(patch_conv|patch_embed\.proj|.*patch_embeddings\.projection)\.": "embeddings.patch_embedding.",
    r"^embeddings\.cls_token$": "embeddings.class_embedding",
    r"^(embeddings\.position_embeddings|pos_embed\.weight)$": "embeddings.position_embedding.weight",
    r"^ln_pre\.": "pre_layrnorm.",
    r"^layernorm\.": "post_layernorm.",
    r"^(blocks|encoder\.layer|transformer\.layers)\.": "encoder.layers.",
    r"\.(norm1|layernorm_before|attention_norm)\.": ".layer_norm1.",
    r"\.(norm2|layernorm_after|ffn_norm)\.": ".layer_norm2.",
    r"\.(attn|attention)\.": ".self_attn.",
    r"\.self_attn\.(proj|projection_layer|o_proj)\.": ".self_attn.out_proj.",
    r"\.feed_forward\.": ".mlp.",
    r"\.(linear_fc1|mlp\.0)\.": ".fc1.",
    r"\.(linear_fc2|mlp\.2)\.": ".fc2.",
    r"\.ln_q\.": ".norm.",
}
PATCHES = "embeddings.patch_embedding"
FIRST_TOKEN = "embeddings.class_embedding"
POSITIONS = "embeddings.position_embedding.weight"
FIRST_NORM = "pre_layrnorm"
ENCODER_LAYERS = "encoder.layers"
LAST_NORM = "post_layernorm"


class _Attended(NamedTuple):
    """Which patches attend to each other: those of the same window. All windows have one size; a single
    window has all patches."""

    rotation: tuple[Tensor, Tensor] | None = None  # cosines and sines, [windows, 1, places, head size]
    windows: tuple[int, int] = (1, -1)  # how many there are, and places in one; -1: what the other one leaves
    source: Tensor | None = None  # which patch is at each place, int64 [windows * places]; None: in order
    places: Tensor | None = None  # where each patch is, int64 [patches]
    is_patch: Tensor | None = None  # whether there is one, bool [windows, 1, 1, places]; None: everywhere


class VisionTower(nn.Module, ImageEncoder):
    """Reads a tile, uint8 RGB [1, height, width, 3], and returns the embeddings of its tokens, float32
    [tokens, width of the language model]. `make_tower` makes one.

    tensors: by their names in the checkpoint, or those of transformers' model; they are shared, not copied.
    dtype: of the arithmetic, if not that of the tensors. Raises KeyError for a part of the checkpoint or a
    needed field of its files that is missing, and for an unknown activation; for most tensors of a part only
    when a tile runs. In the methods x is [patches, width].
    """

    # Pixels of a tile's side; None: tiles have any size, a multiple of `token_side`.
    tile_side: int | None = None
    token_side: int
    default_merge = 1  # patches along the side of a token
    # Whether the table of positions is scaled to the tile with aligned corners; None: it fits.
    aligns_corners: bool | None = None
    _is_pixtral = False

    def __init__(self, manifest: Manifest, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None):
        super().__init__()
        self._config = {**manifest.vision_family.defaults, **manifest.config_json}
        vision = self._vision = manifest.vision_config
        self._tower = _Tensors(tensors, TOWER, dtype)
        newline = next((tensors[name] for name in tensors if re.match(NEWLINE, name)), None)
        self.newline = None if newline is None else newline.tolist()
        scale, shift = _normalization(manifest.processor_config)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)
        self._heads = vision.get("num_attention_heads") or vision.get("num_heads", 16)
        self._activation = ACT2FN[vision["hidden_act"]]
        self._epsilon = vision.get("layer_norm_eps") or vision.get("rms_norm_eps", 1e-6)
        numbers = itertools.count()
        first_norm = ENCODER_LAYERS + ".{}.layer_norm1.weight"
        self._layer_count = next(n for n in numbers if first_norm.format(n) not in self._tower)
        self._patch_side = self._tower[f"{PATCHES}.weight"].shape[-1]
        merge = self._config.get("spatial_merge_size") or vision.get("spatial_merge_size")
        self._merge = merge or self.default_merge
        self.token_side = self._patch_side * self._merge

    @torch.inference_mode()
    def encode_tile(self, tile: np.ndarray) -> np.ndarray:
        """Returns the embeddings of a tile: uint8 [1, height, width, 3] -> float32 [tokens, width], a new
        array. Runs on the device of the tower."""
        return self(torch.tensor(tile, device=self.scale.device)).cpu().numpy()

    def normalize(self, tiles: Tensor) -> Tensor:
        """The values of pixels, uint8 [tiles, height, width, 3] -> float32 [tiles, 3, height, width]."""
        return (tiles.float() * self.scale - self.shift).permute(0, 3, 1, 2)

    def for_transformers(self, values: Tensor) -> Tensor:
        """Returns the `pixel_values` that transformers' model takes for the tiles of an image. values: the
        tiles, float32 [tiles, 3, height, width], as `normalize` returns them."""
        return values

    @staticmethod
    def adapt(model: nn.Module) -> None:
        """Changes transformers' model of the family in place, where this server needs another computation.
        Most families need none. To be called once for a model: hooks would add up."""

    def _patches(self, tile: Tensor) -> tuple[Tensor, int, int]:
        """Returns the embedded patches of a tile, [patches, width], in the order of `_in_order`, and how many
        rows and columns of patches the tile has. If `aligns_corners` is set, the table of positions is scaled
        to the tile, and added. tile: uint8 [1, height, width, 3]."""
        tower = self._tower
        weight = tower[f"{PATCHES}.weight"]
        if weight.dim() == 5:
            weight = weight.sum(2)  # an image is a film of equal frames
        values = self.normalize(tile).to(weight.dtype)
        grid = F.conv2d(values, weight, tower.get(f"{PATCHES}.bias"), stride=self._patch_side)
        rows, columns = grid.shape[2], grid.shape[3]
        if self.aligns_corners is not None and POSITIONS in tower:
            table = tower[POSITIONS]
            side = math.isqrt(table.shape[0])
            square = table.t().view(1, -1, side, side)
            grid = grid + F.interpolate(
                square, size=(rows, columns), mode="bilinear", align_corners=self.aligns_corners
            )
        return self._in_order(grid[0].permute(1, 2, 0)), rows, columns

    def _in_order(self, grid: Tensor) -> Tensor:
        """The patches of a grid in the order of the tower: [rows, columns, width] -> [patches, width]."""
        return grid.flatten(0, 1)

    def _rotated(self, x: Tensor, rows: int, columns: int) -> _Attended:
        """Returns one window of all patches, with the cosines and sines of their rotary positions in the
        dtype of `x`. rows, columns: how many patches the tile has."""
        size = x.shape[-1] // self._heads
        theta = (self._vision.get("rope_parameters") or self._vision).get("rope_theta", 10_000.0)
        frequencies = theta ** -(torch.arange(0, size, 2, device=x.device).float() / size)
        down = frequencies[::2]  # [head size / 4]
        across = frequencies[1::2] if self._is_pixtral else down
        y = torch.arange(rows, device=x.device).float()[:, None, None] * down
        z = torch.arange(columns, device=x.device).float()[None, :, None] * across
        shape = (rows, columns, down.shape[0])
        angles = torch.cat([y.expand(shape), z.expand(shape)] * 2, -1)
        angles = self._in_order(angles)[None, None]
        return _Attended((angles.cos().to(x.dtype), angles.sin().to(x.dtype)))

    def _layer(self, x: Tensor, n: int, within: _Attended) -> Tensor:
        """Returns the output of layer `n`, [patches, width]: attention and MLP, each after a norm, and each
        added to its input."""
        tower = self._tower
        at = f"{ENCODER_LAYERS}.{n}"
        attended = self._attend(self._norm(x, f"{at}.layer_norm1"), f"{at}.self_attn", within)
        x = x + tower.get(f"{at}.lambda_1", 1) * attended
        return x + tower.get(f"{at}.lambda_2", 1) * self._mlp(self._norm(x, f"{at}.layer_norm2"), f"{at}.mlp")

    def _attend(self, x: Tensor, at: str, within: _Attended) -> Tensor:
        """Returns the output of the attention `at`, [patches, width], in the order of `x`: each patch attends
        to those of its window. at: the beginning of the names of its tensors."""
        linear = self._tower.linear
        if f"{at}.qkv.weight" in self._tower:
            query, key, value = linear(x, f"{at}.qkv").chunk(3, -1)
        else:
            query, key, value = (linear(x, f"{at}.{name}_proj") for name in "qkv")
        query = self._head_norm(query, f"{at}.q_norm")
        key = self._head_norm(key, f"{at}.k_norm")
        heads = []  # [windows, heads, places, head size]
        for each in (query, key, value):
            if within.source is not None:
                each = each[within.source]
            split = each.unflatten(0, within.windows).unflatten(-1, (self._heads, -1))
            heads.append(split.transpose(1, 2))
        if within.rotation:
            heads[:2] = (_rotate(each, *within.rotation) for each in heads[:2])
        attended = F.scaled_dot_product_attention(*heads, attn_mask=within.is_patch)
        x = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        if within.places is not None:
            x = x[within.places]
        return linear(x, f"{at}.out_proj")

    def _head_norm(self, x: Tensor, name: str) -> Tensor:
        """Returns `x` after the norm `name` of each head, or of all heads together, as the shape of its
        weight says; `x` as it is if the tower has no such norm."""
        weight = self._tower.get(f"{name}.weight")
        return x if weight is None else self._norm(x.unflatten(-1, (-1, *weight.shape)), name).flatten(-2)

    def _mlp(self, x: Tensor, at: str) -> Tensor:
        linear = self._tower.linear
        if f"{at}.gate_proj.weight" in self._tower:
            hidden = self._activation(linear(x, f"{at}.gate_proj")) * linear(x, f"{at}.up_proj")
            return linear(hidden, f"{at}.down_proj")
        return linear(self._activation(linear(x, f"{at}.fc1")), f"{at}.fc2")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._tower.norm(x, name, self._epsilon)


class ProjectedTower(VisionTower):
    """A tower of transformers' vision models, whose output a projector reads. The names of tensors tell which
    tower and which projector it is."""

    def __init__(self, manifest: Manifest, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None):
        super().__init__(manifest, tensors, dtype)
        self._projector = _Tensors(tensors, PROJECTOR, dtype)
        self._is_pixtral = POSITIONS not in self._tower
        self._is_idefics = "modality_projection.proj.weight" in self._projector
        self._rotates = self._is_pixtral or self.aligns_corners is not None
        if self._is_pixtral:
            self._epsilon = 1e-5  # transformers does not read Pixtral's
        if not self._rotates:
            self.tile_side = self._vision["image_size"]

    def forward(self, tile: Tensor) -> Tensor:
        x, rows, columns = self._patches(tile)
        features = self._features(x, self._rotated(x, rows, columns) if self._rotates else _Attended())
        if self._config.get("vision_feature_select_strategy") == "default":
            features = features[1:]
        return self._project(features, rows, columns).float()

    def _features(self, x: Tensor, within: _Attended) -> Tensor:
        """Returns what the projector reads, [tokens, width]: the outputs of the layers that
        `vision_feature_layer` names, joined along the width; without that field, or with -1 in InternViT, the
        output after the last norm. Later layers do not run. x: [patches, width]. The tokens are the patches,
        after the tower's first token if it has one."""
        tower = self._tower
        if FIRST_TOKEN in tower:
            x = torch.cat([tower[FIRST_TOKEN].view(1, -1), x])
        if not self._rotates:
            x = x + tower[POSITIONS].flatten(0, -2)
        if f"{FIRST_NORM}.weight" in tower:
            x = self._norm(x, FIRST_NORM)
        selected = self._config.get("vision_feature_layer")
        is_internvit = f"{ENCODER_LAYERS}.0.lambda_1" in tower
        reads_all = selected is None or (is_internvit and selected == -1)
        if reads_all:
            selected = -1
        # 0 is what the first layer reads.
        wanted = selected if isinstance(selected, list) else [selected]
        wanted = [n % (self._layer_count + 1) for n in wanted]
        states = [x]
        for n in range(max(wanted)):
            states.append(self._layer(states[-1], n, within))
        x = torch.cat([states[n] for n in wanted], -1)
        return self._norm(x, LAST_NORM) if reads_all and f"{LAST_NORM}.weight" in tower else x

    def _project(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Returns what the language model reads of a tile: [patches, width] -> [tokens, width of the language
        model]. The names of the projector's tensors tell which projector it is. rows, columns: of patches."""
        projector = self._projector
        config = self._config
        if self._is_idefics:
            joined = _join(x, rows, columns, config.get("scale_factor", 2)).flatten(1)
            return projector.linear(joined, "modality_projection.proj")
        if "mm_input_projection_weight" in projector:  # Gemma
            side = math.isqrt(config.get("mm_tokens_per_image", 256))
            pooled = F.avg_pool2d(x.t().view(1, -1, rows, columns), rows // side)
            x = projector.norm(pooled[0].flatten(1).t(), "mm_soft_emb_norm", self._epsilon, offset=1.0)
            return x @ projector["mm_input_projection_weight"]
        if "layer_norm.weight" in projector:  # InternVL
            joined = _join(x, rows, columns, round(1 / config.get("downsample_ratio", 0.5))).flatten(1)
            x = projector.norm(joined, "layer_norm", 1e-5)
        if "pre_norm.weight" in projector:  # PaddleOCR-VL
            x = _join(projector.norm(x, "pre_norm", 1e-5), rows, columns, self._merge).flatten(1)
        if "patch_merger.merging_layer.weight" in projector:  # Mistral Small, LightOnOCR
            x = projector.norm(x, "norm", config["text_config"].get("rms_norm_eps", 1e-6))
            joined = _join(x, rows, columns, self._merge)
            x = projector.linear(joined.transpose(1, 2).flatten(1), "patch_merger.merging_layer")
        activation = ACT2FN[config.get("projector_hidden_act", "gelu")]
        return projector.linear(activation(projector.linear(x, "linear_1")), "linear_2")

    def for_transformers(self, values: Tensor) -> Tensor:
        return values if self.newline is None and not self._is_idefics else values[None]

    @staticmethod
    def adapt(model: nn.Module) -> None:
        """Divides Granite's logits by their scaling, which transformers does in Granite's text model alone,
        not in LLaVA's."""
        if scaling := getattr(model.config.get_text_config(), "logits_scaling", None):
            head = model.get_output_embeddings()
            head.register_forward_hook(lambda _head, _inputs, logits: logits / scaling)


class PaddleTower(ProjectedTower):
    """The tower of PaddleOCR-VL: SigLIP over an image of any size, for which its table of positions is
    scaled, with rotary positions as well."""

    aligns_corners = False  # see `adapt`

    def for_transformers(self, values: Tensor) -> Tensor:
        """[1, 3, height, width] -> [patches, 3, side, side], row by row."""
        side = self._patch_side
        return F.unfold(values, side, stride=side)[0].T.unflatten(1, (3, side, side))

    @staticmethod
    def adapt(model: nn.Module) -> None:
        """Interpolates positions without aligned corners, as the model was trained: so do transformers 5.0,
        vLLM and the code on the hub, while transformers 5.20 aligns the corners."""
        model.model.visual.vision_model.embeddings.interpolation_align_corners = False


class QwenTower(VisionTower):
    """The tower of Qwen2-VL; of Qwen2.5-VL, some of whose layers attend within windows; of Qwen3-VL and of
    Qwen3.5. In Qwen3-VL each embedding goes on with those that the first layers of the language model add
    (DeepStack): [tokens, (1 + layers) * width]."""

    default_merge = 2
    aligns_corners = True

    def forward(self, tile: Tensor) -> Tensor:
        vision = self._vision
        x, rows, columns = self._patches(tile)
        image = windows = self._rotated(x, rows, columns)
        side = vision.get("window_size", 0) // self.token_side  # in tokens; 0: there are no windows
        if side:
            windows = self._windows(side, rows // self._merge, columns // self._merge, *image.rotation)
        deepstack = []
        for n in range(self._layer_count):
            x = self._layer(x, n, image if n in vision.get("fullatt_block_indexes", ()) else windows)
            if n in vision.get("deepstack_visual_indexes", ()):
                merger = f"deepstack_merger_list.{len(deepstack)}"
                deepstack.append(self._merged(self._joined(x), merger))
        return torch.cat([self._merged(x, "merger"), *deepstack], -1).float()

    def for_transformers(self, values: Tensor) -> Tensor:
        """[1, 3, height, width] -> [patches, 3 * 2 * side * side], with two equal frames. Patches of one
        token are neighbours."""
        side = self._patch_side
        patches = F.unfold(values, side, stride=side)[0].T
        ordered = self._in_order(patches.unflatten(0, (values.shape[2] // side, -1)))
        return ordered.unflatten(1, (3, 1, -1)).expand(-1, -1, 2, -1).flatten(1)

    @staticmethod
    def adapt(model: nn.Module) -> None:
        """Changes the model in place: the first layers of Qwen3-VL's text model add the `deepstack` of
        `embed` (pretrained.py). transformers' own way selects tokens by a mask, which cannot be traced. Other
        models stay as they are."""

        def add(n: int, _layer: nn.Module, _inputs: tuple, arguments: dict[str, Any], output: Tensor):
            return output + arguments["deepstack"][n] if "deepstack" in arguments else output

        for n in range(len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))):
            hook = functools.partial(add, n)
            model.get_decoder().layers[n].register_forward_hook(hook, with_kwargs=True)

    def _in_order(self, grid: Tensor) -> Tensor:
        """[rows, columns, width] -> [patches, width]; the patches of one token are neighbours."""
        return _join(grid, grid.shape[0], grid.shape[1], self._merge).flatten(0, 1)

    def _windows(self, side: int, rows: int, columns: int, *rotation: Tensor) -> _Attended:
        """The windows of `side` x `side` tokens in an image of `rows` x `columns` tokens. Windows at its
        edges have places without a patch. rotation: the cosines and sines of the whole image.

        With windows of 2 x 2 tokens of one patch, an image of 2 x 3 tokens has two windows: the patches 0, 1,
        3, 4 and 2, none, 5, none.
        """
        patches = self._merge**2
        device = self.scale.device
        # Whole numbers throughout: in bfloat16 larger ones than 256 would be rounded.
        patch = torch.arange(rows * columns * patches, device=device).view(rows, columns, patches)
        padded = F.pad(patch, (0, 0, 0, -columns % side, 0, -rows % side), value=-1)
        # [rows of windows, columns of windows, side, side, patches]
        windows = padded.unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)
        source = windows.clamp(min=0).flatten()
        # The other way round: the places in the order of the patches, before which the padding is sorted.
        places = windows.flatten().argsort()[padded.numel() - patch.numel() :]
        size = side**2 * patches
        cos, sin = (each[0, 0, source].unflatten(0, (-1, 1, size)) for each in rotation)
        is_patch = (windows >= 0).reshape(-1, 1, 1, size)
        return _Attended((cos, sin), (-1, size), source, places, is_patch)

    def _merged(self, x: Tensor, at: str) -> Tensor:
        """[patches, width] -> [tokens, width of the language model]."""
        linear = self._tower.linear
        joined = self._joined(self._norm(x, f"{at}.norm"))
        return linear(F.gelu(linear(joined, f"{at}.fc1")), f"{at}.fc2")

    def _joined(self, x: Tensor) -> Tensor:
        """[patches, width] -> [tokens, width of all patches of a token]; what is joined stays as it is."""
        return x.reshape(-1, self._merge**2 * self._tower[f"{PATCHES}.weight"].shape[0])


class GlmTower(QwenTower):
    """The tower of GLM-OCR: a convolution makes a token of its patches, and a gated MLP follows."""

    def _merged(self, x: Tensor, at: str) -> Tensor:
        tower = self._tower
        weight = tower["downsample.weight"].permute(0, 2, 3, 1).flatten(1)  # in the order of `_joined`
        x = F.linear(self._joined(self._norm(x, LAST_NORM)), weight, tower["downsample.bias"])
        x = tower.norm(tower.linear(x, f"{at}.proj"), f"{at}.post_projection_norm", 1e-5)
        return self._mlp(F.gelu(x), at)


def tower_class(family: VisionFamily) -> type[VisionTower]:
    return globals()[family.tower]


def make_tower(manifest: Manifest, *arguments: Any) -> VisionTower:
    """Returns the tower of a model. arguments: the tensors, and the dtype of the arithmetic if it is another
    one, as for `VisionTower`, whose errors it raises."""
    return tower_class(manifest.vision_family)(manifest, *arguments)


class _Tensors(nn.Module):
    """The tensors of one part of a checkpoint, and layers made of them. The names of the part begin with the
    pattern `place`; a tensor is found by the rest of its name, as NAMES changes it.

    dtype: of the tensors as they are read; None: as they are stored. Raises KeyError for a checkpoint without
    the part.
    """

    def __init__(self, tensors: Mapping[str, Tensor], place: str, dtype: torch.dtype | None):
        super().__init__()
        self._dtype = dtype
        names = [name for name in tensors if re.match(place, name)]
        if not names:
            raise KeyError(f"the checkpoint has no tensor {place}")
        for name in names:
            own = name
            for pattern, part in {f"^{place}": "", **NAMES}.items():
                own = re.sub(pattern, part, own)
            self.register_buffer(own.replace(".", "/"), tensors[name])

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._buffers[name.replace(".", "/")]
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def __contains__(self, name: str) -> bool:
        return name.replace(".", "/") in self._buffers

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str, epsilon: float, offset: float = 0.0) -> Tensor:
        """Returns `x` after a layer norm, or, if there is no bias, after an RMS norm, to whose weights
        `offset` is added."""
        weight = self[f"{name}.weight"]
        if f"{name}.bias" in self:
            return F.layer_norm(x, weight.shape, weight, self[f"{name}.bias"], epsilon)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return (weight + offset) * wide.to(x.dtype)


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision tower, the projector or the row ends."""
    return re.match(f"{TOWER}|{PROJECTOR}|{NEWLINE}", name) is not None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint that `is_vision` names, by their names in its safetensors files; {}
    if there are none."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if is_vision(name):
                    tensors[name] = file.get_tensor(name)
    return tensors


def _normalization(preprocessor: Json) -> tuple[Tensor, Tensor]:
    """Returns what pixels of 0 to 255 are multiplied by, and what is then subtracted: float32 [3] each, by
    color. preprocessor: the fields of its files. If `do_normalize` is false, 0 is subtracted; if `do_rescale`
    is false, pixels are not divided by 255. Both are true where they are missing. Raises KeyError for a
    missing `image_mean` or `image_std` that is needed."""
    factor = preprocessor.get("rescale_factor", 1 / 255) if preprocessor.get("do_rescale", True) else 1.0
    if not preprocessor.get("do_normalize", True):
        return torch.full((3,), factor), torch.zeros(3)
    mean, deviation = torch.tensor([preprocessor["image_mean"], preprocessor["image_std"]])
    return factor / deviation, mean / deviation


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `x` turned by rotary positions. x: [1 or windows, heads, patches, head size]; cos, sin: [1 or
    windows, 1, patches, head size]. In these forms, with the axis given as 3, OpenVINO makes one operation of
    it."""
    first, second = x.chunk(2, 3)
    return x * cos + torch.cat([-second, first], -1) * sin


def _join(x: Tensor, rows: int, columns: int, by: int) -> Tensor:
    """Joins neighbours in a grid of patches, [rows * columns, width] or [rows, columns, width], `by` x `by`
    of them to a token: [tokens, by * by, width]. Rows and columns that are left over are dropped."""
    grid = x.view(rows, columns, -1)[: rows // by * by, : columns // by * by]
    grid = grid.reshape(rows // by, by, columns // by, by, x.shape[-1])
    return grid.transpose(1, 2).reshape(-1, by * by, x.shape[-1])
