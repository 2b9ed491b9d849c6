"""Which tokenizers are refused at a start."""

import json
import shutil

import pytest
from processes import Server
from tiny_tokenizers import byte_level
from tokenizers import Tokenizer, normalizers

import models.tokenizer
from config import DEMO_MODEL, Config
from models.tokenizer import check_tokenizer
from run import ConfigError


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    return made


def tokenizer_with(folder, normalizer):
    tokenizer = byte_level()
    tokenizer.normalizer = normalizer
    tokenizer.save(str(folder / "tokenizer.json"))


def checked(folder, **settings):
    return check_tokenizer(Config(model_id=str(folder), **settings), folder, folder.parent)


def refused_tokenizer(folder):
    with pytest.raises(ConfigError) as refused:
        checked(folder)
    (line,) = str(refused.value).splitlines()
    return line


def test_a_tokenizer_that_blows_up_is_refused_within_its_memory(folder, monkeypatch):
    monkeypatch.setattr(models.tokenizer, "CHECK_BYTES", 500_000_000)
    tokenizer_with(folder, normalizers.Sequence([normalizers.Replace("a", "aa")] * 40))
    assert refused_tokenizer(folder) == "the tokenizer needs more than 0.5 GB of memory, so it cannot be served"


def test_a_tokenizer_that_takes_too_long_is_refused(folder, monkeypatch):
    monkeypatch.setattr(models.tokenizer, "CHECK_S", 0.01)
    byte_level().save(str(folder / "tokenizer.json"))
    assert refused_tokenizer(folder) == "the tokenizer needs more than 0.01 s, so it cannot be served"


def test_the_check_finds_the_largest_id_of_ordinary_text(folder):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<never in text>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    most = tokenizer.token_to_id("<never in text>")
    assert 90 < checked(folder).largest_id < most


def test_a_tokenizer_whose_tokens_the_model_does_not_have_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    written = json.loads(Tokenizer.from_file(str(folder / "tokenizer.json")).to_str())
    vocabulary = written["model"]["vocab"]
    written["model"]["vocab"] = {token: i + 10**6 * token.isalnum() for token, i in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with Server("--model-id", str(folder)) as server:
        assert server.wait_exit() == 2
        assert f"the tokenizer in {folder} makes the token 100" in server.log
        assert "of ordinary text, and the vocabulary of the model has the tokens 0 to " in server.log


def test_what_checks_a_tokenizer_has_no_token_of_the_hub(folder, monkeypatch):
    (folder / "tokenizer.json").touch()
    (folder / "text").mkdir()
    (folder / "text" / "__init__.py").touch()
    (folder / "text" / "tokenizer.py").write_text(
        "import json, os; print(json.dumps({'eos_token_ids': [*os.environ], 'largest_id': 0}))"
    )
    monkeypatch.setattr(models.tokenizer, "HERE", folder)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HOME", "/")
    names = checked(folder).eos_token_ids
    assert "HOME" in names and "HF_TOKEN" not in names
