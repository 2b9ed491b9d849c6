"""Positions of three numbers are those of transformers' Qwen2-VL, whatever part of a prompt runs, and in copied prefixes."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from models.images.encoder_cache import EncoderCache
from models.images.grid_positions import GridPositions
from protocol import Image

pytestmark = pytest.mark.models

CANVASES = {5: (2, 7), 6: (4, 3), 7: (1, 1), 8: (9, 1)}  # rows, columns


def ids_of(key):
    rows, columns = CANVASES[key]
    return Image(key, rows * columns, (1, 1, 1), b"").ids


PROMPTS = [
    [*ids_of(5), 3],
    [1, 2, *ids_of(6), 3, 4, *ids_of(8), 5, 6, 7],
    [1, *ids_of(5), *ids_of(6), *ids_of(6), *ids_of(7), *ids_of(7), 3],
    [1, 2, 3, 4],
]


@pytest.fixture
def grids():
    cache = EncoderCache(1)
    for key, canvas in CANVASES.items():
        cache.add(key, np.zeros((len(ids_of(key)), 1), np.float32), canvas)
    return GridPositions(2, 60, cache)


def transformers_positions(prompt):
    keys = [-1 - token >> 16 for token in prompt if token < 0 and not -1 - token & 0xFFFF]
    grid = torch.tensor([[1, *(2 * n for n in CANVASES[key])] for key in keys])
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)))
    model.get_vision_position_ids = Qwen2VLModel.get_vision_position_ids.__get__(model)
    types = torch.tensor([[int(token < 0) for token in prompt]])
    positions, _delta = Qwen2VLModel.get_rope_index(model, torch.tensor([prompt]), types, grid if keys else None)
    return positions[:, 0].numpy()


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[1], PROMPTS[3]])
def test_positions_are_those_of_transformers(grids, prompt):
    assert np.array_equal(grids.extend(0, prompt, 0), transformers_positions(prompt))


def test_images_without_a_text_between_them_follow_each_other(grids):
    found = grids.extend(0, PROMPTS[2], 0)
    starts = [0, 1, 15, 27, 39, 40, 41]
    assert found[0, starts].tolist() == [0, 1, 8, 12, 16, 17, 18]
    assert found[:, 14].tolist() == [1, 2, 7] and found[:, 26].tolist() == [8, 11, 10]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_chunk_may_begin_anywhere(grids, prompt):
    whole = grids.extend(0, prompt, 0).copy()
    chance = random.Random(0)
    for _ in range(20):
        grids.extend(1, [9] * 60, 0)
        begin = chance.randrange(len(prompt))
        grids.copy(0, 1, begin)
        while begin < len(prompt):
            size = chance.randint(1, 6)
            found = grids.extend(1, prompt[begin : begin + size], begin)
            assert np.array_equal(found, whole[:, begin : begin + size])
            begin += size
