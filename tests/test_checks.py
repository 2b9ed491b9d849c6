"""What hostile model folders, and machines that are full or small, can do to a start: one line, and nothing is left behind."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from processes import Server
from tiny_tokenizers import byte_level
from tokenizers import Tokenizer, normalizers

import models.tokenizer
import run
from config import DEMO_MODEL, Config
from manifest import Manifest
from models.tokenizer import check_tokenizer
from run import HERE, ConfigError

LLAMA = {"model_type": "llama", "vocab_size": 100, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SOON_S = 20  # for what takes less than a second on a machine with nothing else to do


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAMA))
    return made


def refusal(folder):
    with pytest.raises(ConfigError) as refused:
        Manifest.read(folder)
    (line,) = str(refused.value).splitlines()
    return line


# Files


FILES = ("config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja", ".x/shard.safetensors")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["/proc/self/environ", "/dev/zero", "../other/file", "../other"])
def test_a_link_out_of_the_folder_is_refused_with_what_it_points_to(folder, name, target):
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "file").write_text("{}")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target if target[0] == "/" else folder.parent / target[3:])
    line = refusal(folder)
    assert line.startswith(f"{path} is a link to ")
    assert line.endswith(" outside of the model's folder; copy the file into the folder, or remove the link")


def test_a_link_to_nothing_or_to_itself_is_refused_by_name(folder):
    (folder / "tokenizer.json").symlink_to("nothing")
    assert refusal(folder).startswith(f"{folder}/tokenizer.json is a link to {folder}/nothing, which does not exist; copy the")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    assert refusal(folder).startswith(f"{folder}/tokenizer.json is a link to itself; ")


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)
        made.bind(path.name)


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a named pipe"), (make_socket, "a socket")])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "sub/anything"])
def test_what_is_no_file_is_refused_by_name_without_opening_it(folder, name, make, kind, monkeypatch):
    monkeypatch.chdir(folder)  # `make_socket` changes it
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    assert refusal(folder) == f"{path} is {kind}; a model consists of regular files, so remove it"


def test_a_named_pipe_ends_a_start_at_once_with_2_and_one_line(folder):
    os.mkfifo(folder / "tokenizer_config.json")
    with Server("--model-id", str(folder)) as server:
        assert server.wait_exit(SOON_S) == 2
        assert (
            server.log
            == f"error: {folder}/tokenizer_config.json is a named pipe; a model consists of regular files, so "
            + ("remove it\n")
        )


def test_the_folder_may_be_a_link_and_links_inside_of_it_are_followed_as_kubernetes_makes_them(folder):
    (folder / "..2026").mkdir()
    (folder / "config.json").rename(folder / "..2026" / "config.json")
    (folder / "..data").symlink_to("..2026")
    (folder / "config.json").symlink_to("..data/config.json")
    (folder / "loop").symlink_to(".")
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert Manifest.read(link).model_type == "llama"


def test_a_snapshot_of_the_hub_may_link_to_the_files_of_its_own_model_alone(tmp_path):
    snapshot, blobs = (tmp_path / "models--a--b" / name for name in ("snapshots/c0ffee", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text(json.dumps(LLAMA))
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert Manifest.read(snapshot).model_type == "llama"
    (tmp_path / "models--a--c").mkdir()
    (tmp_path / "models--a--c" / "2").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../../models--a--c/2")
    assert refusal(snapshot).startswith(f"{snapshot}/tokenizer.json is a link to {tmp_path}/models--a--c/2, outside of")


@pytest.mark.parametrize(("name", "limit"), [("config.json", 10), ("tokenizer.json", 100), ("chat_template.jinja", 1)])
def test_a_file_that_is_too_large_is_refused_with_its_size_and_the_limit_before_it_is_read(folder, name, limit):
    with open(folder / name, "ab") as file:
        file.truncate(limit * 1_000_000)
    if name != "config.json":  # which would be read now
        Manifest.read(folder)
    os.truncate(folder / name, 10**12)
    assert refusal(folder).startswith(f"{folder}/{name} has 1000000.0 MB and may have at most {limit} MB")


def test_weights_have_no_limit(folder):
    with open(folder / "model.safetensors", "wb") as file:
        file.truncate(10**12)
    assert Manifest.read(folder).model_type == "llama"


def test_a_folder_of_too_many_files_is_refused(folder, monkeypatch):
    monkeypatch.setattr("manifest.MAX_ENTRIES", 5)
    for name in "abcde":
        (folder / name).touch()
    assert refusal(folder) == f"{folder} holds 5 files or more; give a folder with nothing but the model"


def test_the_web_processes_have_no_token_of_the_hub():
    tokens = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HF_API_TOKEN")
    with Server(WEB_CONCURRENCY="2", **dict.fromkeys(tokens, "hf_secret")) as server:
        server.wait_ready()
        web, (worker,) = server.pids("web.py"), server.pids("worker.py")
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in web]
        assert len(web) == 3 and all(b"WEB_CONCURRENCY=" in environment for environment in environments)
        assert not [environment for environment in environments if b"hf_secret" in environment]
        assert b"HF_TOKEN=hf_secret" in Path(f"/proc/{worker}/environ").read_bytes()


# Numbers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", 10**30),
        ("hidden_size", -1),
        ("hidden_size", "4096"),
        ("num_hidden_layers", 10**6),
        ("num_hidden_layers", True),
        ("n_layer", 1.5),
        ("num_attention_heads", [10**9, 4]),
        ("num_key_value_heads", {}),
        ("intermediate_size", 10**12),
        ("num_local_experts", -2),
        ("max_position_embeddings", 10**30),
        ("num_labels", 10**9),
        ("max_position_embeddings", "many"),
    ],
)
@pytest.mark.parametrize("section", ["text_config", "vision_config", None])
def test_a_number_that_no_model_has_is_refused_by_name(folder, name, value, section):
    shown = value[0] if isinstance(value, list) else value
    changes = {section: {name: value}} if section else {name: value}
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    assert refusal(folder).startswith(f"{folder}/config.json: {name} is {shown!r:.50} and should be a whole number from ")


@pytest.mark.parametrize("section", [[1], "x", 5, True])
def test_a_section_that_is_no_object_is_refused_in_one_line(folder, section):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"text_config": section}))
    assert refusal(folder) == f"{folder}/config.json: text_config should be a JSON object, not {type(section).__name__}"


def test_an_integer_of_thousands_of_digits_is_refused_in_one_line(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA)[:-1] + ', "eos_token_id": ' + "9" * 5000 + "}")
    assert refusal(folder).startswith(f"{folder}/config.json cannot be read as JSON")


def test_numbers_that_published_models_have_are_taken(folder):
    published = {"num_key_value_heads": None, "intermediate_size": [64, 32], "num_experts": 0, "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(LLAMA | published | {"max_position_embeddings": 10_485_760}))
    assert Manifest.read(folder).max_positions == 10_485_760


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_eos_id_that_no_model_has_is_refused(folder, name):
    (folder / name).write_text(json.dumps((LLAMA if name == "config.json" else {}) | {"eos_token_id": [2, 10**30]}))
    assert refusal(folder).startswith(f"{folder}: eos_token_id is 1000000000")


def test_ids_beyond_the_vocabulary_do_not_keep_a_model_from_being_served(tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [999_999, -1]}))
    with Server("--model-id", str(tmp_path / "model")) as server:
        server.wait_ready()
        assert server.generate("A fox", max_new_tokens=2)[0] == 200
        assert server.log.count("EOS ids that are ignored") == 1
        assert server.stop() == 0


# Tokenizers


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


# The machine


@pytest.fixture
def short_path():
    """A folder whose path leaves room for the name of a socket; pytest's own may not."""
    with tempfile.TemporaryDirectory(prefix="textgen-") as name:
        yield Path(name)


@pytest.fixture
def with_name_of(short_path):
    """Makes a folder whose path has that many bytes."""

    def make(length):
        folder = short_path / ("x" * (length - len(str(short_path)) - 1))
        folder.mkdir()
        assert len(str(folder)) == length
        return folder

    return make


def run_in(folder, *command):
    """The exit code and the output of a start in the shell `command`, with the log in place of the arguments."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"TMPDIR": str(folder), "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=SOON_S)
    return done.returncode, done.stderr


def one_error(code_and_output):
    code, output = code_and_output
    assert code == 2, output
    (line,) = [line for line in output.splitlines() if line.split()[1:2] != ["INFO"]]
    return line


START = "./entrypoint.sh serve --port 1"
LONGEST = run.MAX_SOCKET_NAME - len("/neuron-textgen.12345678/worker.sock")


def test_a_folder_for_temporary_files_with_too_long_a_name_is_refused_with_the_variable(with_name_of):
    folder = with_name_of(LONGEST + 1)
    line = one_error(run_in(folder, "sh", "-c", START))
    assert line == f"error: {folder}: the name is 1 bytes too long for a folder with a socket; name another with TMPDIR"
    assert not [*folder.iterdir()]


def test_a_server_runs_in_a_folder_with_the_longest_name_that_a_socket_may_have(with_name_of):
    with Server(TMPDIR=str(with_name_of(LONGEST))) as server:
        server.wait_ready()
        server.process.terminate()
        assert server.process.wait(SOON_S) == 0


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("ulimit -n 20", "20 open files (ulimit -n), and the server needs at least 256; raise the limit"),
        ("ulimit -v 1000000", "1024000000 bytes of address space (ulimit -v), and the server needs at least 2000000000"),
    ],
)
def test_too_low_a_limit_of_the_process_is_refused_with_what_is_needed(short_path, limit, words):
    line = one_error(run_in(short_path, "sh", "-c", f"{limit}; {START}"))
    assert line.startswith("error: this process may have ") and words in line
    assert not [*short_path.iterdir()]


def test_a_folder_for_temporary_files_that_is_not_there_is_named_with_the_variable(tmp_path):
    line = one_error(run_in(tmp_path / "nowhere", "sh", "-c", START))
    assert str(tmp_path / "nowhere") in line and line.endswith("No such file or directory; name another folder with TMPDIR")


needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="needs root and mount namespaces",
)


@needs_mounts
@pytest.mark.parametrize(
    ("options", "fill", "words"),
    [
        ("size=64k,ro", "true", "Read-only file system; name another folder with TMPDIR"),
        ("size=64k", "cat /dev/zero > $TMPDIR/fill", "No space left on device; free space, or name another folder with TMPDIR"),
    ],
)
def test_a_full_or_read_only_folder_for_temporary_files_is_named_with_the_variable(short_path, options, fill, words):
    mounted = f"mount -t tmpfs -o {options} tmpfs $TMPDIR; {fill} 2>/dev/null; {START}; code=$?; ls $TMPDIR >&2; exit $code"
    code, output = run_in(short_path, "unshare", "--mount", "sh", "-c", mounted)
    line = one_error((code, output.removesuffix("fill\n")))  # nothing else is left there
    assert str(short_path) in line and words in line


def test_checking_the_largest_folder_takes_less_than_a_few_seconds(folder):
    for number in range(20_000):
        (folder / f"{number}.bin").touch()
    began = time.monotonic()
    assert Manifest.read(folder).model_type == "llama"
    assert time.monotonic() - began < 5
