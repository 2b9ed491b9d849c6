"""What a model folder says, and how a broken one is refused: in one line, with exit code 2."""

import json
import re
import shutil

import pytest
from loop import boot
from processes import Server

from config import DEMO_MODEL
from manifest import Manifest, check_weight_files, check_weights, vision_part
from models.errors import ModelError
from run import ConfigError


@pytest.fixture
def model(tmp_path):
    """A folder that says that it holds a model; returns a function that writes its files."""

    def write(config=(), generation_config=None):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | dict(config)))
        if generation_config is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
        return tmp_path

    return write


def refusal(folder):
    with pytest.raises(ConfigError) as refused:
        Manifest.read(folder)
    (line,) = str(refused.value).splitlines()
    return line


def test_a_manifest_is_read_from_both_files(model, monkeypatch):
    folder = model({"max_position_embeddings": 4096, "eos_token_id": 2}, {"eos_token_id": [7, 2, 9], "top_k": 50})
    monkeypatch.setenv("HOME", str(folder.parent))
    for written in (folder, str(folder), f"~/{folder.name}"):
        assert Manifest.read(written) == Manifest("llama", 4096, (2, 7, 9))


CLIP = {"image_processor_type": "CLIPImageProcessorFast", "patch_size": 16, "size": {"shortest_edge": 336}}
TYPE = "image_processor_type"


@pytest.mark.parametrize(
    ("kind", "files", "why"),
    [
        ("llava", {"preprocessor_config.json": CLIP}, None),
        ("llava", {"preprocessor_config.json": CLIP, "processor_config.json": {"patch_size": None}}, None),
        ("llava", {"processor_config.json": {"image_processor": CLIP}}, None),
        ("llava", {}, f"its folder has no preprocessor_config.json or processor_config.json that .* preprocessed ({TYPE})"),
        ("llava", {"preprocessor_config.json": {"size": 336}}, f"its folder has no .* ({TYPE})"),
        ("llava", {"processor_config.json": {"image_processor": {TYPE: "My"}}}, f"its {TYPE} My is not supported"),
        ("llava", {"preprocessor_config.json": {TYPE: "GotOcr2ImageProcessor"}}, f"its {TYPE} GotOcr2.* is not supported"),
        ("llama", {"preprocessor_config.json": CLIP}, ""),
        ("paligemma", {"preprocessor_config.json": {TYPE: "SiglipImageProcessor"}}, ""),
    ],
)  # fmt: skip
def test_whether_images_are_read_follows_from_the_family_and_its_image_processor(model, kind, files, why):
    folder = model({"model_type": kind, "image_token_index": 5.0})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    manifest = Manifest.read(folder)
    assert manifest.reads_images == (why is None)
    assert re.fullmatch(re.escape(why or "").replace(r"\.\*", ".*"), manifest.why_no_images)
    assert manifest.image_token_id == 5
    if why is None:
        assert manifest.image_processor == "CLIPImageProcessor"
        assert manifest.processor_config == CLIP


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "eos_token_ids"),
    [
        ({}, None, ()),
        ({"eos_token_id": None}, {}, ()),
        ({"eos_token_id": 0}, None, (0,)),
        ({}, {"eos_token_id": 4}, (4,)),
        ({"eos_token_id": 2}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": [4, 3]}, (2, 3, 4)),
        ({"eos_token_id": "</s>"}, {"eos_token_id": [4, None, "x"]}, (4,)),
        ({"eos_token_id": 2.0}, {"eos_token_id": [[3], [4.0]]}, (2, 3, 4)),
        ({"text_config": {"eos_token_id": 5}}, {}, (5,)),  # a vision-language model's
        ({"text_config": {"eos_token_id": 5}, "eos_token_id": 2}, {}, (2,)),
        ({"text_config": {"eos_token_id": 5}}, {"eos_token_id": 3}, (3,)),
    ],
)
def test_every_eos_id_that_either_file_names_counts(model, in_config, in_generation_config, eos_token_ids):
    assert Manifest.read(model(in_config, in_generation_config)).eos_token_ids == eos_token_ids


@pytest.mark.parametrize(
    ("written", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"seq_length": 512}, 512),
        ({"max_position_embeddings": 4096, "n_positions": 1024}, 4096),
        ({"max_position_embeddings": None, "n_positions": 1024}, 1024),
        ({"max_position_embeddings": -1}, None),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"text_config": None, "max_position_embeddings": 4096}, 4096),
    ],
)
def test_the_context_length_is_read_under_each_of_its_names(model, written, length):
    assert Manifest.read(model(written)).max_positions == length


# Broken folders


def test_a_folder_that_is_not_there_or_holds_no_model_is_refused(tmp_path):
    assert refusal(tmp_path / "nowhere") == f"--model-id {tmp_path}/nowhere: there is no such folder"
    assert refusal(tmp_path) == f"{tmp_path} is not a model folder: it has no config.json"
    (tmp_path / "config.json").symlink_to("nothing")
    assert refusal(tmp_path) == f"{tmp_path} is not a model folder: it has no config.json"


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("params.json", "{}", " but params.json, Mistral's own format; give the same model in transformers' format"),
        (
            "adapter_config.json",
            '{"base_model_name_or_path": "someone/base"}',
            "; it is a LoRA adapter: give --model-id someone/base, and the adapter with --lora-adapters",
        ),
        (
            "adapter_config.json",
            "{}",
            "; it is a LoRA adapter: give --model-id its base model, and the adapter with --lora-adapters",
        ),
    ],
)
def test_a_folder_without_config_json_is_called_what_it_is(tmp_path, name, content, hint):
    (tmp_path / name).write_text(content)
    assert refusal(tmp_path) == f"{tmp_path} is not a model folder: it has no config.json{hint}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read as JSON"),
        (b'{"model_type": "llama",}', "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"eos_token_id": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (b"[]", "should hold a JSON object, not list"),
        (b"null", "should hold a JSON object, not NoneType"),
        (b"{}", "has no `model_type`"),
        (b'{"model_type": 5}', "has no `model_type`"),
        (b'{"model_type": "llama", "text_config": [1]}', ": text_config should be a JSON object, not list"),
        (b'{"model_type": "llama", "text_config": 0}', ": text_config should be a JSON object, not int"),
    ],
    ids=lambda value: repr(value[:25]),
)
def test_a_config_json_that_cannot_be_used_is_refused_with_the_reason(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    line = refusal(tmp_path)
    assert line.startswith(f"{tmp_path}/config.json") and words in line


def test_a_folder_in_the_place_of_a_file_is_refused(model):
    folder = model()
    (folder / "generation_config.json").mkdir()
    assert refusal(folder).startswith(f"{folder}/generation_config.json cannot be read as JSON: ")


def test_more_parameters_than_the_weights_can_hold_are_refused_with_both_numbers(tmp_path):
    for number in range(2):
        with open(tmp_path / f"model-0000{number + 1}-of-00003.safetensors", "wb") as file:
            file.truncate(5_000_000_000)
    check_weights(10_000_000_000, tmp_path)
    with pytest.raises(ConfigError, match=r"describes 15\.0 billion parameters, more than its weight files of 10\.000 GB can"):
        check_weights(15_000_000_000, tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").symlink_to("blobs/gone")
    with pytest.raises(ConfigError, match=r"model-00003-of-00003\.safetensors cannot be read: No such file"):
        check_weights(15_000_000_000, tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 100\n"
IS_POINTER = "is a git-lfs pointer, not the file: run `git lfs pull` in its repository"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([], "holds no weights (model.safetensors)"),
        (["model.fp16.safetensors"], "holds no model.safetensors, but model.fp16.safetensors: rename it"),
        (["llama3.safetensors"], "holds no model.safetensors, but llama3.safetensors: rename it"),
        (
            ["consolidated.safetensors"],
            "holds no model.safetensors, but consolidated.safetensors: it has Mistral's own format; ",
        ),
        (["model-1-of-2.safetensors", "model-2-of-2.safetensors"], None),
        (["model-2-of-2.safetensors"], "lacks 1 of its weight files, model-1-of-2.safetensors among them"),
        (
            ["model-00001-of-000003.safetensors", "model-00003-of-000003.safetensors"],
            "lacks 1 of its weight files, model-00002-of-000003.safetensors among them",
        ),
        (["pytorch_model.bin"], "holds no model.safetensors, but pytorch_model.bin: it is pickled, which is not read; "),
        (["q4.gguf", "q8.gguf"], "holds no model.safetensors, but q4.gguf: name the file, --model-id "),
        (
            ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"],
            "holds no model.safetensors, but m-00001-of-00002.gguf: name the file, --model-id ",
        ),
        (["model.safetensors", "consolidated.safetensors"], None),
        (["1.safetensors", "2.safetensors", "model.safetensors.index.json"], None),
        (["2.safetensors", "model.safetensors.index.json"], "lacks 1 of its weight files, 1.safetensors among them"),
    ],
)
def test_a_folder_without_weights_that_are_read_is_refused_with_what_it_has(tmp_path, files, why):
    for name in files:
        (tmp_path / name).write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}')
    if why is None:
        check_weight_files(tmp_path)
        return
    with pytest.raises(ConfigError) as refused:
        check_weight_files(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path} {why}")


@pytest.mark.parametrize("index", [["1.safetensors"], {"a": 1}, {"a": {"file": "1.safetensors"}}])
def test_an_index_that_does_not_name_files_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ConfigError, match=r"`weight_map` must name a file for each tensor$"):
        check_weight_files(tmp_path)


def test_a_pointer_of_git_lfs_in_the_place_of_weights_or_of_config_json_is_called_that(tmp_path):
    (tmp_path / "model.safetensors").write_text(POINTER)
    with pytest.raises(ConfigError) as refused:
        check_weight_files(tmp_path)
    assert str(refused.value) == f"{tmp_path}/model.safetensors {IS_POINTER}"
    (tmp_path / "config.json").write_text(POINTER)
    assert refusal(tmp_path) == f"{tmp_path}/config.json {IS_POINTER}"


def test_a_folder_with_its_models_in_subfolders_names_the_last_one(tmp_path):
    for name in ("checkpoint-100", "checkpoint-200"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert refusal(tmp_path).endswith(f" has its models in subfolders: give one, --model-id {tmp_path}/checkpoint-200")


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "auto"])
def test_a_dtype_that_names_no_type_is_refused_with_what_to_write(model, dtype):
    for facts in ({"dtype": dtype}, {"dtype": None, "text_config": {"dtype": dtype}}):
        folder = model(facts)
        assert refusal(folder) == f"{folder}/config.json: dtype is {dtype!r}; write a type's name, such as 'bfloat16'"


def in_config(**fields):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def is_folder(name):
    def change(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def leads_nowhere(name):
    def change(folder):
        (folder / name).unlink()
        (folder / name).symlink_to("gone")

    return change


def without_tokenizer_and_weights(folder):
    """The tokenizer is named first: weights may be many GB to download."""
    leads_nowhere("tokenizer.json")(folder)
    leads_nowhere("model.safetensors")(folder)


@pytest.fixture
def demo(tmp_path):
    """A copy of the demonstration model."""
    return shutil.copytree(DEMO_MODEL, tmp_path / "model")


@pytest.mark.models
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (is_folder("model.safetensors"), "model.safetensors cannot be read: Is a directory"),
        (leads_nowhere("model.safetensors"), "model.safetensors cannot be read: No such file or directory"),
        (is_folder("tokenizer.json"), "tokenizer.json cannot be read: Is a directory"),
        (is_folder("tokenizer_config.json"), "tokenizer_config.json cannot be read as JSON: Is a directory"),
        (without_tokenizer_and_weights, "holds no tokenizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_folder_ends_a_start_with_one_line(tmp_path, demo, caplog, broken, words):
    broken(demo)
    with pytest.raises((ConfigError, ModelError)) as refused:
        boot(tmp_path, "--model-id", str(demo))
    (line,) = str(refused.value).splitlines()
    assert words in line and str(demo) in line
    assert not [record for record in caplog.records if record.levelname != "INFO"]


@pytest.mark.processes
def test_what_the_process_that_converts_a_model_refuses_ends_the_server_with_2_and_one_line(demo):
    in_config(vocab_size="2048")(demo)
    with Server("--model-id", str(demo), LOG_LEVEL="warn") as server:
        assert server.wait_exit() == 2
        (line,) = server.log.splitlines()
    assert "vocab_size': TypeError: Field 'vocab_size' expected int, got str" in line and str(demo) in line


@pytest.mark.models
def test_ids_beyond_the_vocabulary_do_not_keep_a_model_from_being_served(tmp_path, demo, caplog):
    caplog.set_level("INFO")
    (demo / "generation_config.json").write_text(json.dumps({"eos_token_id": [999_999, 10**30, -1, 7]}))
    assert boot(tmp_path, "--model-id", str(demo)).eos_token_ids == [0, 7]
    assert caplog.text.count("Ignoring EOS ids") == 1
    assert f"{demo} on cpu (openvino), weights in bfloat16: " in caplog.messages[-2]


@pytest.mark.parametrize(("name", "kind"), [("model", "folder"), ("model.gguf", "file")])
def test_what_does_not_exist_is_called_what_it_would_be(tmp_path, name, kind):
    assert refusal(tmp_path / name) == f"--model-id {tmp_path / name}: there is no such {kind}"


@pytest.mark.parametrize("vision", [{"image_size": []}, {"model_type": ["x"]}, {"model_type": {}}])
def test_a_vision_config_of_another_form_is_read_as_far_as_it_goes(vision):
    assert vision_part({"model_type": "llava", "vision_config": vision}).items() >= vision.items()
