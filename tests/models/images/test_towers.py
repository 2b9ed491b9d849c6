"""Images are read as `transformers` reads them, on both engines, in any schedule, to the last bit; and what is served where a
vision tower is not.

The checkpoints are tiny and random (`vision_models`), and their tiles smaller than published ones: those of published size
take too long for every run.
"""

import itertools
import json
import logging
import shutil
import subprocess
import sys
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import made
import numpy as np
import pytest
import torch
import transformers
import vision_models
from loop import Driven, NoMetrics
from safetensors.torch import load_file, save_file
from tiny_models import MARGIN, run, settings
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import models.convert
from config import Config
from manifest import VISION_FAMILIES, Manifest
from models.accuracy import find_fault, kl_divergence
from models.base import Chunk
from models.cache import cache_key
from models.checkpoint import pretrained
from models.images import towers as vision
from models.images.embeddings import Canvas, arrange
from models.images.towers import make_tower, read_tensors
from models.openvino import OpenVino, convert
from models.openvino import model as openvino_model
from models.pytorch.model import TorchModel
from protocol import Generate, Image, SubmitRequests
from run import HERE

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("conversions"), pytest.mark.filterwarnings("ignore")]

NEW_TOKENS = 8
QUESTION = [260, 40, 41, 290, 70, 81, 92]  # any ids of text
CANVASES = ("llava_next", "granite_vision", "llava_onevision")
LINES = {"pixtral": (5 * 16, 7 * 16), "mistral3": (4 * 28, 6 * 28), "lighton_ocr": (9 * 14, 7 * 14)}  # with rests
HYBRIDS = ("qwen3_5", "qwen3_5_moe")
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", *HYBRIDS, "glm_ocr", "paddleocr_vl")  # of positions of three numbers
BOTH = ("openvino", "torch")
PUBLISHED = 1


class Picture(NamedTuple):
    """An image as it reaches the worker, and as it reaches transformers."""

    image: Image
    tiles: np.ndarray
    inputs: dict[str, torch.Tensor]


class Zoo:
    """For each family a checkpoint, transformers' model of it, and pictures; each made when it is first needed."""

    def __init__(self):
        self.folder = cache(self._folder)
        self.reference = cache(self._reference)
        self.picture = cache(self._picture)
        self.text = cache(self._text)

    def _folder(self, family, shrink=None):
        by = shrink or small(family)
        return made.once(f"vision/{family}-{by}", lambda folder: vision_models.make(family, folder, by))

    def _reference(self, family, shrink=None):
        folder = self.folder(family, shrink)
        model = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
        if family == "paddleocr_vl":  # as in transformers 5.0, vLLM and the code that the model was trained with
            model.model.visual.vision_model.embeddings.interpolation_align_corners = False
        return model

    def _picture(self, family, seed=0, shrink=None):
        """Of random tiles. Those of canvases are wide or high, and have padding."""
        model = self.reference(family, shrink)
        side = getattr(model.config.vision_config, "image_size", None)
        side = side[0] if isinstance(side, list | tuple) else side
        inputs, canvas, shape = {}, (), (1 if family == "gemma3" else 2, side, side)
        if family in LINES:
            shape = (1, *LINES[family])
            inputs["image_sizes"] = torch.tensor([shape[1:]])
        elif family in CANVASES:
            size = [(3 * side // 4, 5 * side // 4), (5 * side // 4, 3 * side // 4)][seed]
            canvas = canvas_of(size, model.config)
            patches = side // model.config.vision_config.patch_size
            shape = (1 + canvas.rows * canvas.columns // patches**2, side, side)
            inputs["image_sizes"] = torch.tensor([size])
        elif family in GRIDS:
            canvas = [(5, 7), (8, 3)][seed]
            patch = model.config.vision_config.patch_size
            shape = (1, *(2 * patch * n for n in canvas))
            inputs["image_grid_thw"] = torch.tensor([[1, *(2 * n for n in canvas)]])
        tiles = np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)
        processor = Manifest.read(self.folder(family, shrink)).processor_config
        mean, deviation = (torch.tensor(processor[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
        values = (torch.from_numpy(tiles).permute(0, 3, 1, 2) / 255 - mean) / deviation
        is_of_one_image = family in (*CANVASES, "smolvlm", "idefics3")
        inputs["pixel_values"] = values[None] if is_of_one_image else values
        if family in GRIDS:
            kind, frames = (PaddleOCRVLImageProcessorPil, 1) if family == "paddleocr_vl" else (Qwen2VLImageProcessorPil, 2)
            inputs["pixel_values"] = torch.from_numpy(kind.patchify(None, values[0].numpy(), patch, 2, frames)[0])
        image = Image(1000 + seed, len(features(model, inputs)), shape, tiles.tobytes(), tuple(canvas))
        return Picture(image, tiles, inputs)

    def prompt(self, family, seed=0, shrink=None):
        return [1, 280, *self.picture(family, seed, shrink).image.ids, *QUESTION]

    def of_two_images(self, family):
        first, second = (self.picture(family, seed).image.ids for seed in (0, 1))
        return [1, *first, 280, *second, *QUESTION]

    def _text(self, family, shrink=None, has_two=False):
        prompt = self.of_two_images(family) if has_two else self.prompt(family, 0, shrink)
        return self.continued(family, prompt, [0, 1][: 1 + has_two], shrink)

    def continued(self, family, prompt, seeds, shrink=None):
        """What transformers continues a prompt with the images of these seeds with, and the smallest lead of a token."""
        model = self.reference(family, shrink)
        inputs = [self.picture(family, seed, shrink).inputs for seed in seeds]
        inputs = {name: torch.cat([each[name] for each in inputs]) for name in (inputs[0] if seeds else ())}
        ids = torch.tensor([[model.config.image_token_id if token < 0 else token for token in prompt]])
        if family == "gemma3":
            inputs["token_type_ids"] = torch.tensor([[int(token < 0) for token in prompt]])
        if family in GRIDS:
            inputs["mm_token_type_ids"] = torch.tensor([[int(token < 0) for token in prompt]])
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
        return out.sequences[0, len(prompt) :].tolist(), (best - second).min().item(), torch.cat(out.logits).numpy()


def small(family):
    """What the sides of tiles are divided by in most tests; transformers' SmolVLM needs 16 tokens of a tile."""
    return 2 if family == "smolvlm" else 4


def features(model, inputs):
    with torch.inference_mode():
        found = model.get_image_features(**inputs)
    embeddings = torch.cat([each.flatten(0, -2) for each in found.pooler_output])
    deepstack = getattr(found, "deepstack_features", None) or ()
    return torch.cat([embeddings, *(each for features in deepstack for each in features)], -1).numpy()


def canvas_of(size, config):
    """By transformers' own functions."""
    side = config.vision_config.image_size
    patches = side // config.vision_config.patch_size
    rows, columns = (n * patches for n in get_anyres_image_grid_shape(size, config.image_grid_pinpoints, side))
    _, kept_rows, kept_columns = unpad_image(torch.zeros(1, rows, columns), size).shape
    return Canvas(rows, columns, (rows - kept_rows) // 2, (columns - kept_columns) // 2, kept_rows, kept_columns)


@pytest.fixture(scope="session")
def visions():
    return Zoo()


def serve(folder, engine="openvino", **changes):
    config = settings(folder, 3000, **{"max_batch_size": 4, "dtype": "float32"} | changes)
    if engine == "torch":
        return TorchModel(config, folder, "cpu")
    return models.load(OpenVino(config, folder, Manifest.read(folder)), lambda phase: None)


def encode(model, picture):
    """Adds an image to the model's cache, as the worker does before a request enters the queue."""
    image = picture.image
    model.encoder_cache.add(image.key, model.vision.encode(picture.tiles, image.canvas, lambda: False), image.canvas)


def logits_scaling(reference):
    """What transformers' LlavaNext leaves out."""
    return getattr(reference.config.get_text_config(), "logits_scaling", 1)


def is_close(found, expected):
    return np.abs(np.stack(found) - expected).max() < 1e-4 * np.ptp(expected)


def on_each_engine(families):
    served = [(family, engine) for family in families for engine in BOTH]
    return pytest.mark.parametrize(("family", "engine"), served)


SIZES = [pytest.param(None, id="small"), pytest.param(PUBLISHED, id="published", marks=pytest.mark.families)]


@on_each_engine(vision_models.FAMILIES)
@pytest.mark.parametrize("shrink", SIZES)
def test_images_are_read_as_by_transformers_alone_and_in_any_schedule_to_the_last_bit(visions, caplog, family, shrink, engine):
    """In chunks, beside texts and other images, after prefixes of the same image and of another one."""
    folder = visions.folder(family, shrink)
    caplog.clear()  # of what transformers says of a config that it makes
    model = serve(folder, engine)
    assert model.engine == engine and "without images" not in caplog.text
    for seed in (0, 1):
        encode(model, visions.picture(family, seed, shrink))
    first, other = visions.prompt(family, 0, shrink), visions.prompt(family, 1, shrink)
    prompts = [first, [*first[:-4], 50, 60], other, first[:20], QUESTION * 4]
    alone = [run(model, [prompt], new_tokens=NEW_TOKENS)[0] for prompt in prompts]
    expected, lead, logits = visions.text(family, shrink)
    assert lead > MARGIN and alone[0].tokens == expected
    assert is_close(alone[0].logits, logits / logits_scaling(visions.reference(family, shrink)))
    assert not np.array_equal(alone[0].logits, alone[2].logits)
    for seed, chunk in enumerate((None, 19) if engine == "openvino" else (None,)):
        together = run(model, prompts * 2, seed, prefill_chunk=chunk, new_tokens=NEW_TOKENS)
        assert sum(sequence.tokens == own.tokens for sequence, own in zip(together, alone * 2)) > 3
        for sequence, own in zip(together, alone * 2):
            assert sequence.tokens == own.tokens[: len(sequence.tokens)]
            assert np.array_equal(sequence.logits, own.logits[: len(sequence.logits)])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_images_are_read_in_any_schedule_to_the_last_bit_with_a_kv_cache_in_eight_bits(visions, family):
    model = serve(visions.folder(family), kv_cache_dtype="u8")
    for seed in (0, 1):
        encode(model, visions.picture(family, seed))
    first, other = visions.prompt(family, 0), visions.prompt(family, 1)
    prompts = [first, [*first[:-4], *QUESTION * 13], [1, *QUESTION * 3, *other], visions.of_two_images(family), QUESTION * 9]
    alone = [run(model, [prompt], new_tokens=NEW_TOKENS)[0] for prompt in prompts]
    for seed, budget in enumerate((None, 33)):
        together = run(model, prompts * 2, seed, budget=budget, new_tokens=NEW_TOKENS)
        for sequence, own in zip(together, alone * 2):
            assert np.array_equal(sequence.logits, own.logits[: len(sequence.logits)])
    expected = visions.text(family)[2]
    assert np.abs(alone[0].logits[0] - expected[0]).max() < 0.05 * np.ptp(expected[0])


@on_each_engine([*GRIDS, "gemma3"])
def test_two_images_have_their_places_in_prefixes_that_are_copied_and_under_drafts(visions, family, engine):
    model = serve(visions.folder(family), engine, speculate=3)
    for seed in (0, 1):
        encode(model, visions.picture(family, seed))
    prompt = visions.of_two_images(family)
    expected, lead, of_transformers = visions.text(family, None, True)
    assert lead > MARGIN
    ends = [len(prompt) - len(QUESTION)]
    model.forward([Chunk(0, prompt[: ends[0]], 0, keep="border")])
    logits = [model.forward([Chunk(0, prompt[ends[0] :], ends[0])])[0]]
    logits += [model.forward([Chunk(0, [token], len(prompt) + n)])[0] for n, token in enumerate(expected[:-1])]
    assert [int(row.argmax()) for row in logits] == expected and is_close(logits, of_transformers)
    if not model.whole_images and not model.states:
        ends += [ends[0] - 5, 20]  # within images
    if model.states:  # which goes on from snapshots only
        ends = sorted({end - end % model.prefix_granularity for end in ends} - {0})
        for begin, end in itertools.pairwise([0, *ends, len(prompt)]):
            model.forward([Chunk(0, prompt[begin:end], begin, keep="border")])
    for end in ends:
        if model.states:
            model.states.resume(0, 2, end)
        model.copy_prefix(0, 2, end)
        (row,) = model.forward([Chunk(2, prompt[end:], end)])
        assert int(row.argmax()) == expected[0] and np.abs(row - logits[0]).max() < 1e-4
    if not model.verify_length:
        return
    wrong = [expected[0], *((token + 1) % model.vocab_size for token in expected[1:4])]
    model.forward([Chunk(2, wrong, len(prompt), verify=True)])
    found = model.forward([Chunk(2, expected[1:5], len(prompt) + 1, verify=True)])
    assert [int(row.argmax()) for row in found] == expected[2:6]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_chat_goes_on_from_snapshots_behind_its_own_images(visions, family):
    """Also one whose message begins with an image; the texts are those of transformers, which has no snapshots."""
    model = serve(visions.folder(family), max_batch_size=1, prefix_slots=3)
    driven = Driven(served=model, metrics=NoMetrics())
    system = [1, 280, 290, 70, 71]

    def ask(text, borders, *seeds):
        """How many tokens were cached."""
        number = len(driven.ends)
        prompt = [*text, 5, 6]
        images = [visions.picture(family, seed).image for seed in seeds]
        request = Generate(number, prompt, NEW_TOKENS, ignore_eos=True, borders=[*borders, len(text)])
        driven.arrive(SubmitRequests([request], images))
        driven.run()
        expected, lead, _logits = visions.continued(family, prompt, seeds)
        assert lead > MARGIN and driven.tokens[number] == expected
        return driven.prompts[number].cached

    def about(seed):
        return [40, *visions.picture(family, seed).image.ids, 41, *QUESTION]

    first = [*system, *about(0)]
    answered = [*first, 5, 6, 92, 81, 2]
    second = [*answered, *QUESTION]
    shown = [*second, 5, 6, 81, 2]
    third = [*shown, *about(1)]
    assert ask(first, [len(system)], 0) == 0
    assert ask(second, [len(system), len(answered)], 0) == len(first)
    assert ask(third, [len(system), len(shown)], 0, 1) == len(second)
    assert ask([*system, *about(1)], [len(system)], 1) == len(system)
    assert ask([*system, *QUESTION], [len(system)]) == len(system)
    assert ask(QUESTION * 4, []) == 0


@pytest.mark.parametrize("engine", BOTH)
def test_a_text_beside_an_image_is_the_text_of_a_step_without_one(visions, engine):
    model = serve(visions.folder("llava_next"), engine)
    encode(model, visions.picture("llava_next"))
    image = visions.prompt("llava_next")
    (alone,) = model.forward([Chunk(1, QUESTION, 0)])
    if model.supports_chunked_prefill:
        together = model.forward([Chunk(0, image, 0), Chunk(1, QUESTION, 0)])
        assert np.array_equal(together[1], alone)
    steps = [model.forward([Chunk(1, [3], len(QUESTION))])[0]]
    model.forward([Chunk(0, image[:-1], 0)])
    steps.append(model.forward([Chunk(0, [image[-1]], len(image) - 1), Chunk(1, [3], len(QUESTION))])[1])
    model.forward([Chunk(0, image[:5], 0)])
    steps.append(model.forward([Chunk(0, [image[5]], 5), Chunk(1, [3], len(QUESTION))])[1])  # an image token
    assert np.array_equal(steps[0], steps[1]) and np.array_equal(steps[0], steps[2])


@pytest.mark.parametrize("engine", BOTH)
def test_an_image_has_the_same_embeddings_whenever_it_is_encoded(visions, engine):
    model, picture = serve(visions.folder("smolvlm"), engine), visions.picture("smolvlm")
    first, second = (model.vision.encode(picture.tiles, (), lambda: False) for _ in range(2))
    assert first.dtype == np.float32 and np.array_equal(first, second)
    assert np.abs(first - features(visions.reference("smolvlm"), picture.inputs)).max() < 1e-4


@pytest.mark.parametrize("engine", BOTH)
def test_an_image_that_nobody_wants_any_more_is_encoded_to_its_next_tile_only(visions, engine):
    model, picture = serve(visions.folder("smolvlm"), engine), visions.picture("smolvlm")
    asked = []
    tiles = np.concatenate([picture.tiles] * 3)
    assert model.vision.encode(tiles, (), lambda: bool(asked.append(None)) or len(asked) == 3) is None
    assert len(asked) == 3


NEARLY_TIED = 0.05  # of the range of the logits
IN_BFLOAT16 = [  # without the marker, one of each mechanism: plain positions, grids and whole images
    family if family in ("smolvlm", "qwen2_5_vl", "gemma3") else pytest.param(family, marks=pytest.mark.families)
    for family in vision_models.FAMILIES
]


def in_bfloat16(visions, family, **changes):
    """A model that has both pictures. Where the CPU multiplies no bfloat16, it is computed in float32."""
    model = serve(visions.folder(family), dtype="bfloat16", threads=2, **changes)
    for seed in (0, 1):
        encode(model, visions.picture(family, seed))
    return model


def one_by_one(prompt, tokens, slot=0):
    """The calls of a prompt that goes on with these tokens; their logits choose each of them."""
    return [Chunk(slot, prompt, 0), *(Chunk(slot, [token], len(prompt) + n) for n, token in enumerate(tokens[:-1]))]


@pytest.mark.parametrize("family", IN_BFLOAT16)
def test_bfloat16_changes_the_logits_little(visions, family):
    """By less than conversions may, and so little that the image counts; the best token is that of transformers in float32
    unless several are nearly tied."""
    model = in_bfloat16(visions, family)
    tokens, _lead, logits = visions.text(family)
    logits = logits / logits_scaling(visions.reference(family))
    found = np.concatenate([model.forward([chunk]) for chunk in one_by_one(visions.prompt(family), tokens)])
    assert find_fault(found, logits, "bfloat16", has_experts=False) is None
    assert np.abs(found - logits).max() < NEARLY_TIED * np.ptp(logits)
    best, second = np.sort(logits)[:, -1], np.sort(logits)[:, -2]
    is_clear = best - second > NEARLY_TIED * np.ptp(logits)
    assert (found.argmax(1) == tokens)[is_clear].all()
    other = np.concatenate([model.forward([chunk]) for chunk in one_by_one(visions.prompt(family, 1), tokens)])
    assert kl_divergence(other, logits).mean() > 10 * kl_divergence(found, logits).mean()


@pytest.mark.parametrize("family", IN_BFLOAT16)
def test_in_bfloat16_images_are_read_in_any_schedule_to_the_last_bit(visions, family):
    """In chunks, beside texts and other images, after prefixes of the same image and of another one, two in a prompt."""
    model = in_bfloat16(visions, family)
    first, other = visions.prompt(family, 0), visions.prompt(family, 1)
    prompts = [first, [*first[:-4], 50, 60], other, first[:20], QUESTION * 4, visions.of_two_images(family)]
    alone = [run(model, [prompt], new_tokens=NEW_TOKENS)[0] for prompt in prompts]
    for seed, chunk in enumerate((None, 19, 64)):
        for sequence, own in zip(run(model, prompts * 2, seed, prefill_chunk=chunk, new_tokens=NEW_TOKENS), alone * 2):
            assert np.array_equal(sequence.logits, own.logits[: len(sequence.logits)])


@pytest.mark.parametrize("family", IN_BFLOAT16)
def test_in_bfloat16_copied_prefixes_of_images_and_drafts_behind_them_change_no_bit(visions, family):
    model = in_bfloat16(visions, family, speculate=3)
    prompt = visions.of_two_images(family)
    tokens = QUESTION[:NEW_TOKENS]
    expected = [model.forward([chunk])[0] for chunk in one_by_one(prompt, tokens)]
    ends = [len(prompt) - len(QUESTION)]
    if not model.whole_images:
        ends += [ends[0] - 5, 20]  # within images
    if model.states:  # which goes on from snapshots only
        ends = sorted({end - end % model.prefix_granularity for end in ends} - {0})
        for begin, end in itertools.pairwise([0, *ends, len(prompt)]):
            model.forward([Chunk(0, prompt[begin:end], begin, keep="border")])
    for end in ends:
        model.copy_prefix(0, 2, end)
        if model.states:
            model.states.resume(0, 2, end)
        assert np.array_equal(model.forward([Chunk(2, prompt[end:], end)])[0], expected[0])
    wrong = [tokens[0], *(token + 1 for token in tokens[1:4])]
    model.forward([Chunk(2, wrong, len(prompt), verify=True)])
    after = len(prompt) + 1  # the first of them is right
    if model.states:
        model.states.accept({2: after})
    assert np.array_equal(model.forward([Chunk(2, tokens[1:4], after, verify=True)]), expected[2:5])


def test_in_bfloat16_images_of_two_requests_that_meet_in_a_step_see_only_their_own(visions):
    model = serve(visions.folder("gemma3"), dtype="bfloat16", threads=2)
    encode(model, visions.picture("gemma3"))
    prompt = visions.prompt("gemma3")
    first = next(n for n, token in enumerate(prompt) if token < 0)
    end = next(n for n, token in enumerate(prompt) if n > first and token >= 0)
    model.forward([Chunk(0, prompt[:first], 0)])
    model.forward([Chunk(0, prompt[first:end], first)])
    expected = model.forward([Chunk(0, prompt[end:], end)])

    model.forward([Chunk(1, prompt[:first], 0)])
    model.forward([Chunk(0, prompt[:end], 0), Chunk(1, prompt[first:end], first)])
    for slot in (0, 1):
        assert np.array_equal(model.forward([Chunk(slot, prompt[end:], end)]), expected)


@pytest.mark.parametrize("engine", BOTH)
def test_the_logits_of_granite_are_scaled_as_in_its_text_model(visions, engine):
    """transformers' LlavaNext leaves the scaling out: greedy texts are the same without it, sampled ones are not."""
    folder, reference = visions.folder("granite_vision"), visions.reference("granite_vision")
    text_model = transformers.GraniteForCausalLM(reference.config.get_text_config()).eval()
    text_model.model.load_state_dict(reference.model.language_model.state_dict())
    text_model.lm_head.load_state_dict(reference.lm_head.state_dict())
    with torch.inference_mode():
        expected = text_model(torch.tensor([QUESTION])).logits[0, -1].numpy()
    (found,) = serve(folder, engine).forward([Chunk(0, QUESTION, 0)])
    assert np.abs(found - expected).max() < 1e-4 * np.ptp(expected)


RENAMED = {  # as transformers wrote them before 4.52, and since
    "llava": [
        {"vision_tower.": "vision_tower.vision_model."},
        {"vision_tower.": "model.vision_tower.vision_model.", "multi_modal_projector.": "model.multi_modal_projector."},
    ],
    "llava_next": [
        {"vision_tower.": "vision_tower.vision_model."},
        {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."}
        | {"image_newline": "model.image_newline"},
    ],
    "internvl": [{"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."}],
    "mistral3": [{"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."}],
    "smolvlm": [{}],
}


@pytest.mark.parametrize("family", RENAMED)
def test_a_tower_is_read_from_files_with_older_and_newer_names(visions, tmp_path, family):
    folder, picture = visions.folder(family), visions.picture(family)
    manifest, stored = Manifest.read(folder), load_file(folder / "model.safetensors")
    expected = features(visions.reference(family), picture.inputs)
    for renamed in ({}, *RENAMED[family]):
        tensors = {}
        for name, tensor in stored.items():
            old = next((old for old in renamed if name.startswith(old)), "")
            tensors[renamed.get(old, "") + name.removeprefix(old)] = tensor
        save_file(tensors, tmp_path / "model.safetensors")
        tower = make_tower(manifest, read_tensors(tmp_path))
        found = np.stack([tower(torch.from_numpy(tile[None])).numpy() for tile in picture.tiles])
        assert np.abs(arrange(found, picture.image.canvas, tower.newline) - expected).max() < 1e-4


@pytest.mark.parametrize("engine", BOTH)
def test_paddleocr_vl_is_read_from_files_as_they_are_published(visions, tmp_path, engine):
    """The text part of config.json is not a part of its own, which transformers takes for tied embeddings; the weights have
    those of a tower's parts that are not used."""
    shutil.copytree(visions.folder("paddleocr_vl"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "default", **text.pop("rope_parameters")}
    text["rope_theta"] = text["rope_scaling"].pop("rope_theta")
    (tmp_path / "config.json").write_text(
        json.dumps(text | config | {"vision_config": config["vision_config"] | {"model_type": "paddleocr_vl"}})
    )
    tensors = load_file(tmp_path / "model.safetensors")
    assert {"lm_head.weight", "model.embed_tokens.weight", "mlp_AR.pre_norm.weight"} < tensors.keys()
    tensors["visual.vision_model.embeddings.packing_position_embedding.weight"] = torch.zeros(9, 32)
    tensors["visual.vision_model.head.probe"] = torch.zeros(1, 1, 32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = serve(tmp_path, engine)
    encode(model, visions.picture("paddleocr_vl"))
    (found,) = model.forward([Chunk(0, visions.prompt("paddleocr_vl"), 0)])
    assert is_close([found], visions.text("paddleocr_vl")[2][:1])


def test_every_tower_is_that_of_a_family():
    named = {vision.tower_class(family) for family in VISION_FAMILIES.values()}
    made = {each for each in vars(vision).values() if isinstance(each, type) and issubclass(each, vision.VisionTower)}
    assert named == made - {vision.VisionTower}


@pytest.mark.parametrize("size", [(768, 768), (500, 2000), (2000, 500), (2300, 2300), (1111, 999)])
def test_a_canvas_is_arranged_and_scaled_down_as_by_transformers(size):
    """LLaVA-OneVision's: beyond nine tiles' worth of patches it is scaled down."""
    sides = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    vision = SimpleNamespace(image_size=384, patch_size=14)
    config = SimpleNamespace(vision_config=vision, image_grid_pinpoints=sides)
    canvas = canvas_of(size, config)
    random = torch.Generator().manual_seed(0)
    tiles = torch.randn(1 + canvas.rows * canvas.columns // 27**2, 27**2, 3, generator=random)
    newline = torch.randn(3, generator=random)
    pack = LlavaOnevisionModel.pack_image_features
    (expected,), _ = pack(SimpleNamespace(config=config), [tiles], [size], newline, "anyres_max_9")
    rows, columns = canvas.kept_rows, canvas.kept_columns
    ratio = (rows * columns / (9 * 27**2)) ** 0.5
    if ratio > 1.1:
        canvas = canvas._replace(kept_rows=int(rows // ratio), kept_columns=int(columns // ratio))
    found = arrange(tiles.numpy(), tuple(canvas), newline.numpy())
    assert found.shape == expected.shape and np.abs(found - expected.numpy()).max() < 1e-5


@pytest.mark.parametrize(("engine", "fault"), [("openvino", "wrong"), ("torch", "wrong"), ("torch", "missing")])
def test_a_model_whose_tower_is_not_that_of_transformers_is_served_without_images(
    visions, tmp_path, monkeypatch, caplog, engine, fault
):
    """One warning says why, at every startup."""
    if fault == "wrong":
        monkeypatch.setattr(vision, "ACT2FN", {"quick_gelu": torch.tanh, "gelu": torch.nn.functional.gelu})
        said = "its image embeddings differ from those of transformers by"
    else:
        monkeypatch.setattr("models.images.towers.TOWER", r"elsewhere\.")
        said = "KeyError: "
    for _start in range(2):
        caplog.clear()
        model = serve(visions.folder("llava"), engine, model_cache=str(tmp_path))
        assert (model.engine, model.encoder_cache) == (engine, None)
        assert model.forward([Chunk(0, QUESTION, 0)]).shape == (1, model.vocab_size)
        (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
        assert f"only the text part of this model is served, without images: {said}" in warning
    assert not list(tmp_path.glob("*/vision.*"))


def test_a_tower_in_bfloat16_is_stored_so_and_loses_nothing(visions, tmp_path, converter):
    folder, side = visions.folder("pixtral"), 30 * 16
    models.convert.convert(settings(folder, dtype="bfloat16"), folder, tmp_path)
    tiles = np.random.default_rng(0).integers(0, 256, (1, side, side, 3), np.uint8)
    encoder = openvino_model.VisionEncoder(tmp_path / "vision.xml", None, {"INFERENCE_PRECISION_HINT": "f32"})
    found = encoder.encode(tiles, (), lambda: False)
    manifest = Manifest.read(folder)
    tensors = {name: tensor.bfloat16().float() for name, tensor in read_tensors(folder).items()}
    tower = make_tower(manifest, tensors)
    expected = tower(torch.from_numpy(tiles)).numpy()
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert (tmp_path / "vision.bin").stat().st_size < 0.6 * stored


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl"])
def test_compressed_weights_read_images_also_those_of_the_vision_tower(visions, family):
    folder = visions.folder(family)
    model = serve(folder, quantize="int8", model_cache=str(folder.with_name("int8")))
    serve(folder, model_cache=str(folder.with_name("float32")))
    encode(model, visions.picture(family))
    (found,) = model.forward([Chunk(0, visions.prompt(family), 0)])
    expected = visions.text(family)[2][0]
    assert model.quantize == "int8" and np.abs(found - expected).max() < 0.1 * np.ptp(expected)
    assert tower_bytes(folder.with_name("int8")) < 0.6 * tower_bytes(folder.with_name("float32"))


def tower_bytes(cache):
    (path,) = cache.glob("*/vision.bin")
    return path.stat().st_size


def test_a_vision_tower_that_does_not_tolerate_int8_stays_as_it_is(visions, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(pretrained.VISION_TOLERANCE, "int8", 1e-5)
    picture = visions.picture("smolvlm")
    caplog.set_level(logging.INFO)
    model = serve(visions.folder("smolvlm"), quantize="int8", model_cache=str(tmp_path))
    found = model.vision.encode(picture.tiles, (), lambda: False)
    assert model.quantize == "int8" and np.abs(found - features(visions.reference("smolvlm"), picture.inputs)).max() < 1e-4
    assert "The vision tower is not compressed: in int8 its image embeddings differ" in caplog.text


def test_a_vision_tower_that_cannot_be_compressed_is_served_as_it_is(visions, tmp_path, monkeypatch, caplog):
    nncf = pytest.importorskip("nncf", reason='pip install "nncf==3.4.0"')

    def fail(*_arguments, **_options):
        raise RuntimeError("no kernel for this tower")

    monkeypatch.setattr(nncf, "compress_weights", fail)
    path = tmp_path / "vision.xml"
    manifest = Manifest.read(visions.folder("smolvlm"))
    caplog.set_level(logging.INFO)
    config = Config(model_id=str(visions.folder("smolvlm")), dtype="float32", quantize="int8")
    facts = convert._convert_vision(visions.reference("smolvlm"), manifest, tmp_path, config)
    assert (facts["vision_activation_group"], path.exists()) == (0, True)
    assert "The vision tower is not compressed: in int8 RuntimeError: no kernel for this tower" in caplog.text


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_the_windows_of_a_large_image_are_those_of_transformers(visions, tmp_path, converter, precision):
    """Windows at the edges of an image have places without a patch."""
    folder, rows, columns = visions.folder("qwen2_5_vl"), 13, 24
    models.convert.convert(settings(folder), folder, tmp_path)
    tiles = np.random.default_rng(0).integers(0, 256, (1, rows * 28, columns * 28, 3), np.uint8)
    encoder = openvino_model.VisionEncoder(tmp_path / "vision.xml", None, {"INFERENCE_PRECISION_HINT": precision})
    found = encoder.encode(tiles, (rows, columns), lambda: False)
    mean, deviation = (torch.tensor(vision_models.CLIP_COLORS[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    values = (torch.from_numpy(tiles[0]).permute(2, 0, 1) / 255 - mean) / deviation
    patches = torch.from_numpy(Qwen2VLImageProcessorPil.patchify(None, values.numpy(), 14, 2, 2)[0])
    inputs = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2 * rows, 2 * columns]])}
    expected = features(visions.reference("qwen2_5_vl"), inputs)
    assert np.abs(found - expected).max() < {"f32": 1e-4, "bf16": 0.05}[precision] * np.abs(expected).max()


def test_how_pixels_are_normalized_belongs_to_the_key_of_a_model_that_reads_images(visions, tmp_path):
    folder = vision_models.make("llava", tmp_path / "llava")
    config = settings(folder)
    keys = [cache_key(config, folder, Manifest.read(folder))]
    path = folder / "preprocessor_config.json"
    processor = json.loads(path.read_text())
    for changes in ({"image_mean": [0.5, 0.5, 0.5]}, {"image_processor_type": "unknown"}, {"image_mean": [0.1, 0.5, 0.5]}):
        processor |= changes
        path.write_text(json.dumps(processor))
        keys.append(cache_key(config, folder, Manifest.read(folder)))
    assert len(set(keys)) == 3 and keys[2] == keys[3]  # without images, it is that of the text


def test_a_worker_reads_images_without_torch(visions, tmp_path):
    folder = visions.folder("smolvlm")
    config = settings(folder, 300)
    models.load(OpenVino(config, folder, Manifest.read(folder)), lambda phase: None)
    code = """if True:
    import sys
    from pathlib import Path
    from config import Config
    from manifest import Manifest
    import models
    import numpy as np
    config = Config.from_json(sys.argv[1])
    folder = Path(config.model_id)
    model = models.load(models.OpenVino(config, folder, Manifest.read(folder)), lambda phase: None)
    embeddings = model.vision.encode(np.zeros((1, 256, 256, 3), np.uint8), (), lambda: False)
    print(embeddings.shape, {"torch", "transformers", "PIL"} & sys.modules.keys())"""
    printed = subprocess.run(
        [sys.executable, "-c", code, config.to_json()], cwd=HERE, capture_output=True, text=True, check=True
    ).stdout
    assert printed == "(16, 48) set()\n"
