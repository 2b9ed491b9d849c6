"""Folders that transformers 5 saved, on the real library with a transformers 4. `make test-neuron` runs these tests twice: with
the last 4, and with the versions of the Neuron SDK.

SERVER_PYTHON is an interpreter with transformers 5, that of `make test`.
"""

import json
import os
import shutil
import subprocess

import pytest
import torch
import transformers
from family_models import MODELS, PLAIN
from test_families import LARGEST, errors, served_logits
from test_server import cores, serve  # noqa: F401

from run import HERE

PYTHON = os.environ.get("SERVER_PYTHON", "")
NO_PYTHON = pytest.mark.skipif(not PYTHON, reason="SERVER_PYTHON names no interpreter with transformers 5")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The folder with a folder for each model."""
    folder = tmp_path_factory.mktemp("saved")
    script = HERE / "tests/neuron_sim/family_models.py"
    subprocess.run([PYTHON, "-I", script, folder], check=True, timeout=600)  # -I: without PYTHONPATH, which names version 4
    return folder


@NO_PYTHON
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MODELS | PLAIN)
def test_a_folder_of_transformers_5_is_served_as_transformers_5_runs_it(saved, tmp_path, name):
    assert transformers.__version__ < "5"
    folder = saved / name
    assert json.loads((folder / "config.json").read_text())["transformers_version"] >= "5"
    model = serve(None, tmp_path, folder, max_batch_size=4, prefill_chunk=8, sampling="host")
    assert errors(served_logits(model), torch.load(folder / "logits.pt")).max() < LARGEST


@NO_PYTHON
def test_a_quantization_config_of_null_which_the_sdks_transformers_fails_on_is_none(saved, tmp_path):
    folder = shutil.copytree(saved / "llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    model = serve(None, tmp_path, folder, max_batch_size=4, dtype="auto")
    assert model.dtype == "float32"
