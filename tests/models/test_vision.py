"""Of models that read images, the text is that of transformers' `generate` for the same tiles, on every engine and in any
schedule; and what is served where the vision tower is not.

The checkpoints are tiny, random, and in published shapes (`vision_models`).
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
import vision_models
from tiny_models import MARGIN, run, settings
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

from manifest import Manifest
from models import openvino_model
from models.image_layout import Canvas
from models.torch_model import TorchModel
from protocol import Image

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("conversions"), pytest.mark.filterwarnings("ignore")]

NEW_TOKENS = 8
QUESTION = [260, 40, 41, 290, 70, 81, 92]  # any ids of text


class Picture(NamedTuple):
    """An image as it reaches the worker, and as it reaches transformers."""

    image: Image
    tiles: np.ndarray
    inputs: dict[str, torch.Tensor]

    @property
    def ids(self):
        return list(self.image.ids)


class Zoo:
    """For each family a checkpoint, transformers' model of it, and pictures, made when they are first needed."""

    def __init__(self, root):
        self.root = root
        self.folder = cache(lambda family: vision_models.make(family, root / family))
        self.reference = cache(self._reference)
        self.picture = cache(self._picture)
        self.text = cache(self._text)

    def _reference(self, family):
        model = transformers.AutoModelForImageTextToText.from_pretrained(self.folder(family), attn_implementation="eager")
        return model.eval()

    def _picture(self, family, seed=0):
        config = self.reference(family).config
        preprocessor = Manifest.read(self.folder(family)).processor_config
        tower, side = config.vision_config, config.vision_config.image_size
        side = side[0] if isinstance(side, list | tuple) else side
        inputs, canvas, shape = {}, (), (2, side, side)
        if family in ("pixtral", "mistral3"):
            shape = (1, 4 * 28, 6 * 28) if family == "mistral3" else (1, 5 * 16, 7 * 16)
            inputs["image_sizes"] = torch.tensor([shape[1:]])
        elif family == "llava":
            shape = (1, side, side)
        elif hasattr(config, "image_grid_pinpoints"):
            size = [(300, 500), (500, 300)][seed % 2]
            canvas = canvas_of(size, config)
            patches = side // tower.patch_size
            shape = (1 + canvas.rows * canvas.columns // patches**2, side, side)
            inputs["image_sizes"] = torch.tensor([size])
        tiles = np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)
        mean, deviation = (torch.tensor(preprocessor[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
        values = (torch.from_numpy(tiles).permute(0, 3, 1, 2) / 255 - mean) / deviation
        batched = "image_grid_pinpoints" in preprocessor or family in ("smolvlm", "idefics3")
        inputs["pixel_values"] = values[None] if batched else values
        with torch.inference_mode():
            features = self.reference(family).get_image_features(**inputs).pooler_output
        tokens = sum(each.numel() for each in features) // features[0].shape[-1]
        return Picture(Image(1000 + seed, tokens, shape, tiles.tobytes(), tuple(canvas)), tiles, inputs)

    def prompt(self, family, seed=0):
        return [1, 280, *self.picture(family, seed).ids, *QUESTION]

    def _text(self, family, prompt):
        """What transformers continues a prompt with, and the smallest lead of a token."""
        model = self.reference(family)
        seeds = sorted({(-1 - token >> 16) - 1000 for token in prompt if token < 0})
        inputs = self.picture(family, *seeds).inputs if seeds else {}
        ids = torch.tensor([[model.config.image_token_id if token < 0 else token for token in prompt]])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **inputs,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best, second = torch.stack(out.logits).topk(2).values.unbind(-1)
        return out.sequences[0, len(prompt) :].tolist(), (best - second).min().item()


def canvas_of(size, config):
    """By transformers' own functions."""
    side = config.vision_config.image_size
    patches = side // config.vision_config.patch_size
    rows, columns = (n * patches for n in get_anyres_image_grid_shape(size, config.image_grid_pinpoints, side))
    _, kept_rows, kept_columns = unpad_image(torch.zeros(1, rows, columns), size).shape
    return Canvas(rows, columns, (rows - kept_rows) // 2, (columns - kept_columns) // 2, 0, 0)


@pytest.fixture(scope="session")
def visions(tmp_path_factory):
    return Zoo(tmp_path_factory.mktemp("visions"))


def serve(folder, engine="openvino", **changes):
    config = settings(folder, 3000, **{"max_batch_size": 4, "threads": 2, "dtype": "float32"} | changes)
    if engine == "torch":
        return TorchModel(config, folder, "cpu")
    return openvino_model.load(config, folder, Manifest.read(folder), lambda phase: None)


def encode(model, picture):
    """Adds an image to the model's cache, as the worker does before a request enters the queue."""
    image = picture.image
    model.encoder_cache.add(image.key, model.encode_image(picture.tiles, image.canvas, lambda: False))


@pytest.mark.parametrize("engine", ["openvino", "torch"])
@pytest.mark.parametrize("family", vision_models.FAMILIES)
def test_images_are_read_as_by_transformers_alone_and_in_any_schedule_to_the_last_bit(visions, caplog, family, engine):
    model = serve(visions.folder(family), engine)
    assert model.engine == engine and not caplog.text
    for seed in (0, 1):
        encode(model, visions.picture(family, seed))
    first, other = visions.prompt(family), visions.prompt(family, 1)
    prompts = [first, [*first[:-4], 50, 60], other, first[:40], QUESTION * 4]
    alone = [run(model, [prompt], new_tokens=NEW_TOKENS)[0] for prompt in prompts]
    expected, lead = visions.text(family, tuple(first))
    assert lead > MARGIN and alone[0].tokens == expected
    assert not np.array_equal(alone[0].logits, alone[2].logits)
    for seed, chunk in enumerate((None, 41) if engine == "openvino" else (None,)):
        together = run(model, prompts * 2, seed, prefill_chunk=chunk, new_tokens=NEW_TOKENS)
        assert sum(sequence.tokens == own.tokens for sequence, own in zip(together, alone * 2)) > 3
        for sequence, own in zip(together, alone * 2):
            assert sequence.tokens == own.tokens[: len(sequence.tokens)]
            assert np.array_equal(sequence.logits, own.logits[: len(sequence.logits)])
