"""Tiles and image tokens of each family are those of transformers' image processors."""

from __future__ import annotations

import importlib
import json
import sys
import warnings

import numpy as np
import pytest
from image_files import noise, save_preprocessor
from PIL import Image
from vision_models import FAMILIES

from manifest import VISION_FAMILIES, Manifest
from run import ConfigError
from text.images import layouts
from text.images.layouts import read_layout

# Of transformers: the module of the processor, and what that passes to the image processor.
PROCESSORS = {
    "granite_vision": ("llava_next", {}),
    "smolvlm": ("smolvlm", {"return_row_col_info": True}),
    "idefics3": ("idefics3", {"return_row_col_info": True}),
    "mistral3": ("pixtral", {"patch_size": 28}),
    "internvl": ("internvl", {"crop_to_patches": True}),
    "qwen3_5": ("qwen3_vl", {}),
    "qwen3_5_moe": ("qwen3_vl", {}),
    "glm_ocr": ("glm46v", {}),
}
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
GRIDS = (*QWEN, "glm_ocr", "paddleocr_vl")
CANVASES = ("llava_next", "granite_vision", "llava_onevision")
# An icon, a thin image, an upright and a wide one, an odd one, one that LLaVA-OneVision scales down.
SIZES = [(64, 48), (23, 200), (333, 777), (1024, 512), (1201, 799), (1650, 1411)]
every_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture
def _same_transformers(monkeypatch):
    """Its image processors import the package a second time, and put that into the place of the first."""
    import transformers

    monkeypatch.setitem(sys.modules, "transformers", transformers)


@pytest.mark.models
@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
@pytest.mark.usefixtures("_same_transformers")
@every_family
def test_tiles_and_text_are_those_of_transformers(name, tmp_path, monkeypatch):
    from transformers import AutoImageProcessor
    from transformers.models.pixtral import image_processing_pil_pixtral

    # The processor's module imports the other one, which needs torchvision.
    monkeypatch.setitem(sys.modules, "transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)

    manifest = save_preprocessor(name, tmp_path)
    layout = read_layout(manifest, {})
    module, options = PROCESSORS.get(name, (name, {}))
    with warnings.catch_warnings(action="ignore"):
        processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    written = text_of_transformers(module, FAMILIES[name]().processor, processor, layout.token)
    mean, deviation = (np.array(manifest.processor_config[field], np.float32) for field in ("image_mean", "image_std"))
    cases = [(size, {}) for size in SIZES]
    if layout.one_tile:
        cases.append(((900, 1200), layout.one_tile))
    for size, overrides in cases:
        made = read_layout(manifest, overrides)(noise(*size))
        named = named_by_transformers(name, overrides)
        outputs = processor(images=[noise(*size)], return_tensors="np", **options, **named)
        assert made.text == written(outputs), size
        values = np.asarray(outputs["pixel_values"], np.float32)
        if name in GRIDS:
            values = in_the_form_of_the_image(values, outputs["image_grid_thw"][0])
            assert made.canvas == tuple(outputs["image_grid_thw"][0][1:] // 2)
        values = values.reshape(-1, *values.shape[-3:]).transpose(0, 2, 3, 1)
        expected = np.rint((values * deviation + mean) * 255)
        assert np.array_equal(np.stack([np.asarray(tile) for tile in made.tiles]), expected), size


def named_by_transformers(name, bounds):
    """GLM-OCR's image processor has no other names for the bounds than those in `size`."""
    if name != "glm_ocr" or not bounds:
        return bounds
    return {"size": {"shortest_edge": bounds.get("min_pixels", 12544), "longest_edge": bounds.get("max_pixels", 9633792)}}


def in_the_form_of_the_image(patches, grid):
    """Of patches, each of two equal frames, of which four by four make a token; of PaddleOCR-VL's, row by row."""
    _, rows, columns = grid
    if patches.ndim == 4:
        side = patches.shape[-1]
        patches = patches.reshape(rows, columns, 3, side, side)
        return patches.transpose(2, 0, 3, 1, 4).reshape(3, rows * side, columns * side)
    side = int((patches.shape[1] // 6) ** 0.5)
    patches = patches.reshape(rows // 2, columns // 2, 2, 2, 3, 2, side, side)
    assert np.array_equal(patches[..., 0, :, :], patches[..., 1, :, :])
    return patches[..., 0, :, :].transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side)


def text_of_transformers(module, fields, image_processor, image_token):
    """A function from the outputs of the image processor. The processor cannot be made without torchvision."""
    kind = getattr(importlib.import_module(f"transformers.models.{module}.processing_{module}"), fields["processor_class"])
    processor = kind.__new__(kind)
    vars(processor).update(
        {"num_additional_image_tokens": 0, "fake_image_token": "<fake_token_around_image>", "global_image_tag": "<global-img>"}
        | {
            "global_image_token": "<global-img>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "spatial_merge_size": 1,
            "effective_patch_size": 28,
        }
        | {"full_image_sequence": f"\n\n<start_of_image>{image_token * 256}<end_of_image>\n\n"}
        | fields
        | {"image_processor": image_processor, "image_token": image_token}
    )
    return lambda outputs: processor.replace_image_token(outputs | {"batch_num_images": [1]}, 0)


def tokens_of(layout, image):
    return layout(image).text.count(layout.token)


# By transformers' processors and models; the tokens for which images are 512 x 512, 1536 x 1024, 333 x 777, 64 x 48.
TOKENS = {
    "llava": (576, 576, 576, 576),
    "llava_next": (2928, 2144, 1976, 1368),
    "granite_vision": (3699, 5157, 2493, 1317),
    "llava_onevision": (3699, 8686, 2493, 1317),
    "smolvlm": (1088, 832, 576, 832),
    "idefics3": (2873, 2197, 1521, 2197),
    "pixtral": (1024, 2752, 1029, 12),
    "mistral3": (361, 2035, 336, 6),
    "lighton_ocr": (324, 2035, 336, 4),
    "internvl": (256, 1792, 2816, 3328),
    "qwen2_vl": (324, 2035, 336, 4),
    "qwen2_5_vl": (324, 2035, 336, 4),
    "qwen3_vl": (256, 1536, 240, 70),
    "qwen3_5": (256, 1536, 240, 70),
    "qwen3_5_moe": (256, 1536, 240, 70),
    "glm_ocr": (324, 2035, 336, 12),
    "paddleocr_vl": (324, 2035, 336, 192),
    "gemma3": (256, 256, 256, 256),
}


@every_family
def test_an_image_takes_as_many_tokens_as_in_transformers(name, tmp_path):
    layout = read_layout(save_preprocessor(name, tmp_path), {})
    found = [tokens_of(layout, noise(*size)) for size in ((512, 512), (1536, 1024), (333, 777), (64, 48))]
    assert tuple(found) == TOKENS[name]


@pytest.mark.models
@pytest.mark.usefixtures("_same_transformers")
@pytest.mark.parametrize("bounds", [{}, {"max_pixels": 200_704}, {"min_pixels": 200_704, "max_pixels": 1_003_520}])
@pytest.mark.parametrize("name", GRIDS)
def test_bounds_give_images_of_all_sizes_as_many_tokens_as_in_transformers(name, bounds, tmp_path, monkeypatch):
    from transformers import AutoImageProcessor

    monkeypatch.setattr(Image.Image, "resize", lambda image, size, *_: Image.new(image.mode, size))  # what is counted is sizes
    layout = read_layout(save_preprocessor(name, tmp_path), bounds)
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil", **named_by_transformers(name, bounds))
    sizes = np.random.default_rng(0).integers(9, 1800, (60, 2)).tolist()
    sizes += [[9, 13], [13, 9], [10, 1501], [1501, 10], [27, 27], [28, 19]]
    found = [tokens_of(layout, Image.new("RGB", size)) for size in sizes]
    assert found == [processor.get_number_of_image_patches(height, width) // 4 for width, height in sizes]
    assert len(set(found)) > 12


@pytest.mark.models
@pytest.mark.usefixtures("_same_transformers")
@pytest.mark.parametrize("name", ["qwen2_vl", "glm_ocr", "paddleocr_vl"])
def test_files_without_bounds_have_those_of_transformers(name, tmp_path):
    from transformers import AutoImageProcessor

    save_preprocessor(name, tmp_path)
    path = tmp_path / "preprocessor_config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({field: fields[field] for field in fields.keys() - {"size", "min_pixels", "max_pixels"}}))
    layout = read_layout(Manifest.read(tmp_path), {})
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    for width, height in [(30, 40), (300, 200), (5000, 4000)]:
        expected = processor.get_number_of_image_patches(height, width) // 4
        assert tokens_of(layout, Image.new("RGB", (width, height))) == expected


@every_family
def test_every_form_of_preprocessor_files_says_the_same(name, tmp_path):
    layouts = []
    for n, form in enumerate(({}, {"nested": True}, {"resample": None})):  # which each family has its own default for
        (tmp_path / str(n)).mkdir()
        layouts.append(vars(read_layout(save_preprocessor(name, tmp_path / str(n), **form), {})))
    assert layouts[0] == layouts[1] == layouts[2]


def test_of_the_canvases_that_keep_all_pixels_the_smallest_is_taken(tmp_path):
    canvases = {"image_grid_pinpoints": [[672, 672], [336, 672], [336, 336], [1008, 336]]}
    assert len(read_layout(save_preprocessor("llava_next", tmp_path), canvases)(noise(64, 48)).tiles) == 2


@pytest.mark.models
@pytest.mark.usefixtures("_same_transformers")
@pytest.mark.parametrize(
    "changes",
    [
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 336, "width": 336}, "do_center_crop": False},
        {"size": {"height": 336, "width": 336}},  # of CLIP's processor, whose size is a short side as published
        {"size": {"height": 400, "width": 400}},
        {"size": {"height": 336, "width": 336}, "crop_size": {"height": 300, "width": 300}, "do_center_crop": False},
    ],
)
def test_an_image_is_scaled_to_a_square_where_the_size_has_a_height(changes, tmp_path):
    from transformers import AutoImageProcessor

    layout = read_layout(save_preprocessor("llava", tmp_path, **changes), {})
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil", do_rescale=False, do_normalize=False)
    made = layout(noise(500, 300))
    expected = processor(images=[noise(500, 300)], return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    assert np.array_equal(np.asarray(made.tiles[0]), expected)


@pytest.mark.models
@pytest.mark.usefixtures("_same_transformers")
@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize(("processor", "class_tokens"), [("CLIPImageProcessor", 1), ("SiglipImageProcessor", 0)])
def test_llava_counts_the_outputs_of_its_tower_that_it_selects(processor, class_tokens, strategy, tmp_path):
    save_preprocessor("llava", tmp_path, image_processor_type=processor, size={"height": 336, "width": 336})
    file = tmp_path / "processor_config.json"
    fields = json.loads(file.read_text()) | {
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": class_tokens,
    }
    file.write_text(json.dumps(fields))
    made = read_layout(Manifest.read(tmp_path), {})(noise(500, 300))
    outputs = {"pixel_values": [np.asarray(made.tiles[0]).transpose(2, 0, 1)]}
    assert made.text == text_of_transformers("llava", fields, None, "<image>")(outputs)


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("smolvlm", [(512, 512)], "<fake_token_around_image><global-img>" + 64 * "<image>" + "<fake_token_around_image>"),
        ("idefics3", [(364, 364)], "<fake_token_around_image><global-img>" + 169 * "<image>" + "<fake_token_around_image>"),
        ("internvl", [(448, 448)], "<img>" + 256 * "<IMG_CONTEXT>" + "</img>"),
        ("qwen2_5_vl", [(420, 588)], 15 * 21 * "<|image_pad|>"),
    ],
)
def test_low_detail_is_one_tile_of_the_whole_image(name, shape, text, tmp_path):
    manifest = save_preprocessor(name, tmp_path)
    made = read_layout(manifest, read_layout(manifest, {}).one_tile)(noise(900, 1200))
    assert ([tile.size for tile in made.tiles], made.text) == (shape, text)


@pytest.mark.parametrize(
    ("name", "overrides", "tokens"),
    [
        ("smolvlm", {"size": {"longest_edge": 1024}}, 5 * 64),
        ("smolvlm", {"size": 512}, 64),
        ("pixtral", {"size": {"longest_edge": 256}}, 16 * 16),
        ("internvl", {"max_patches": 4}, 5 * 256),
        ("internvl", {"min_patches": 9, "max_patches": 9}, 10 * 256),
        ("llava_next", {"image_grid_pinpoints": [[336, 336]]}, 576 + 24 * 25),
        ("qwen2_vl", {"max_pixels": 10 * 10 * 28 * 28}, 100),
        ("qwen2_vl", {"size": {"longest_edge": 10 * 10 * 28 * 28, "shortest_edge": 784}}, 100),
        ("qwen2_vl", {"size": {"max_pixels": 10 * 10 * 28 * 28, "min_pixels": 784}}, 100),
        ("qwen3_vl", {"size": {"longest_edge": 2 * 10**6}, "max_pixels": 10 * 10 * 32 * 32}, 100),
        ("qwen3_vl", {"min_pixels": 64 * 64 * 32 * 32}, 64 * 64),
        ("qwen3_vl", {"min_pixels": 2000, "max_pixels": 1500}, 1),
    ],
)
def test_options_change_what_the_files_say(name, overrides, tokens, tmp_path):
    assert tokens_of(read_layout(save_preprocessor(name, tmp_path), overrides), noise(1000, 1000)) == tokens


@pytest.mark.parametrize(
    ("name", "overrides", "what"),
    [
        ("llava", {"size": 224}, r"size; the fields that this model supports: none$"),
        ("smolvlm", {"max_tiles": 4}, r"max_tiles; the fields that this model supports: size, do_image_splitting$"),
        ("smolvlm", {"max_patches": 4}, r"max_patches; the fields that this model supports: size, do_image_splitting$"),
        ("smolvlm", {"size": {"longest_edge": 0}}, r"`size` must be a positive whole number, .* given: 0$"),
        ("pixtral", {"size": {"height": 600, "width": 400}}, r"`size` must be a positive whole number, .* 'width': 400}$"),
        ("internvl", {"max_patches": "4"}, r"`max_patches` must be a positive whole number.* given: '4'$"),
        ("qwen3_vl", {"max_pixels": -1}, r"`max_pixels` must be a positive whole number.* given: -1$"),
        ("qwen3_vl", {"size": {"longest_edge": "9"}}, r"`max_pixels` must be a positive whole number.* given: '9'$"),
        ("internvl", {"max_patches": True}, r"`max_patches` must be a positive whole number"),
        ("internvl", {"min_patches": 13}, r"`min_patches` 13 is more than `max_patches` 12, so no grid of tiles is left$"),
        ("qwen3_vl", {"max_pixels": {"a": [1]}}, r"`max_pixels` must be a positive whole number.* given: \[1\]$"),
        ("qwen3_vl", {"max_pixels": "9" * 10**6}, r"`max_pixels` must be a positive whole number.* given: '9{99}$"),
        ("qwen2_vl", {"size": 1000}, r"`size` must be an object such as {\"shortest_edge\": 3136, .* given: 1000$"),
        ("qwen2_vl", {"size": [1, 2]}, r"`size` must be an object .* given: \[1, 2\]$"),
        ("qwen2_vl", {"size": {"height": 9, "width": 9}}, r"`size` must be an object .* given: {'height': 9, 'width': 9}$"),
        ("smolvlm", {"do_image_splitting": 0}, r"`do_image_splitting` must be true or false; given: 0$"),
        *(
            (
                "llava_next",
                {"image_grid_pinpoints": wrong},
                r"`image_grid_pinpoints` must be a list of pairs \[height, width\] of ",
            )
            for wrong in (
                [],
                336,
                [336, 672],
                [[336, 600]],
                [[336]],
                [[0, 336]],
                [[-336, 336]],
                [["336", "336"]],
                [[336, 672], {}],
            )
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(name, overrides, what, tmp_path):
    with pytest.raises(ConfigError, match=what) as refused:
        read_layout(save_preprocessor(name, tmp_path), overrides)
    assert "\n" not in str(refused.value)


@pytest.mark.models
@pytest.mark.usefixtures("_same_transformers")
@pytest.mark.parametrize("name", CANVASES)
def test_canvases_are_filled_whatever_do_resize_says(name, tmp_path):
    from transformers import AutoImageProcessor

    layout = read_layout(save_preprocessor(name, tmp_path, do_resize=False), {})
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil", do_rescale=False, do_normalize=False)
    values = processor(images=[noise(500, 300)], return_tensors="np")["pixel_values"]
    expected = values.reshape(-1, *values.shape[-3:]).transpose(0, 2, 3, 1)
    assert np.array_equal(np.stack([np.asarray(tile) for tile in layout(noise(500, 300)).tiles]), expected)


@pytest.mark.parametrize(
    ("name", "fields", "what"),
    [
        *((name, {"do_resize": False}, "`do_resize` must be true; given: False") for name in FAMILIES if name not in CANVASES),
        ("llava", {"do_center_crop": False}, "`do_center_crop` must be true; given: False"),  # the short side is `size`
        ("llava", {"crop_size": 224}, "`crop_size` must be 336, the `image_size` of .* in config.json; given: 224"),
        ("llava_next", {"size": {"shortest_edge": 448}}, "`size` must be 336, the .* given: 448"),
        ("smolvlm", {"max_image_size": {"longest_edge": 384}}, "`max_image_size` must be 512, the .* given: 384"),
        ("internvl", {"size": {"height": 224, "width": 224}}, "`size` must be 448, the .* given: 224"),
        ("gemma3", {"size": {"height": 224, "width": 224}}, "`size` must be 896, the .* given: 224"),
    ],
)
def test_files_that_make_tiles_as_the_tower_does_not_read_them_are_refused(name, fields, what, tmp_path):
    with pytest.raises(ConfigError, match=rf"^preprocessor_config\.json or --mm-processor-kwargs: {what}$"):
        read_layout(save_preprocessor(name, tmp_path, **fields), {})


def test_files_that_lack_a_size_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^preprocessor_config\.json or .*: `crop_size` must be .* given: None$"):
        read_layout(save_preprocessor("llava", tmp_path, crop_size=None), {})


def test_every_layout_is_that_of_a_family_and_has_the_options_that_it_sets():
    used = {getattr(layouts, name) for family in VISION_FAMILIES.values() for name in family.layouts.values()}
    made = {each for each in vars(layouts).values() if isinstance(each, type) and issubclass(each, layouts.Layout)}
    assert used == made - {layouts.Layout}
    assert all(layout.one_tile.keys() <= set(layout.options) for layout in used)
