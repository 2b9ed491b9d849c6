"""The cache of converted models: what a later startup needs, what makes an entry anew, and who may write to it."""

import contextlib
import dataclasses
import errno
import fcntl
import io
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import edit_config, llama, save_checkpoint, settings

import models.cache
import models.convert
from config import Config
from manifest import Manifest
from models.cache import (
    ModelCache,
    cache_key,
    locked,
    read_entry,
    renamed_when_complete,
    write_entry,
)
from models.errors import ModelError, reported_as, run_program
from models.openvino import OpenVino
from models.openvino import model as openvino_model
from run import HERE, ConfigError

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]  # of torch and openvino, while converting


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", llama())


@pytest.fixture(scope="session")
def entry(checkpoint, converter, tmp_path_factory):
    """What a conversion of the checkpoint writes."""
    folder = tmp_path_factory.mktemp("entry")
    models.convert.convert(settings(checkpoint), checkpoint, folder)
    return folder


@pytest.fixture
def copies(entry, monkeypatch):
    """Conversions that take no time: each copies what one has written before."""
    made = []

    def convert(arguments, config):
        made.append(config.model_id)
        shutil.copytree(entry, arguments[1], dirs_exist_ok=True)

    monkeypatch.setattr("models.openvino.run_converter", convert)
    return made


@pytest.fixture
def config(checkpoint, tmp_path):
    return settings(checkpoint, model_cache=str(tmp_path / "cache"))


def load(config: Config):
    return models.load(OpenVino(config, Path(config.model_id), Manifest.read(config.model_id)), lambda phase: None)


def cache_in(folder: Path, size_gb: float = 1.0) -> ModelCache:
    return ModelCache(Config(model_cache=str(folder), model_cache_size=size_gb))


LATER_START = """
import json, sys
from pathlib import Path
from config import Config
from manifest import Manifest
from models import OpenVino, load
config = Config.from_json(sys.stdin.read())
model = load(OpenVino(config, Path(config.model_id), Manifest.read(config.model_id)), lambda phase: None)
print(model.engine, "torch" in sys.modules, "transformers" in sys.modules)
"""


def test_the_first_start_converts_in_a_child_and_a_later_one_imports_neither_torch_nor_transformers(config):
    for _start in range(2):
        command = [sys.executable, "-c", LATER_START]
        done = subprocess.run(command, input=config.to_json(), capture_output=True, text=True, cwd=HERE, check=True)
        assert done.stdout == "openvino False False\n", done.stderr
    assert len(list(Path(config.model_cache).glob("model-*"))) == 1
    assert Path(config.model_cache).stat().st_mode & 0o777 == 0o700


def test_a_converted_model_is_used_again_and_a_changed_checkpoint_is_converted_anew(tmp_path, copies):
    config = settings(save_checkpoint(tmp_path / "model", llama()))
    load(config)
    load(dataclasses.replace(config, max_batch_size=2, max_total_tokens=12, max_input_tokens=11))
    assert len(copies) == 1
    edit_config(Path(config.model_id), rms_norm_eps=1e-3)
    load(config)
    assert len(copies) == 2


def key(config, folder):
    return cache_key(config, folder, Manifest.read(folder))


def test_the_key_depends_on_all_that_a_conversion_reads(config, checkpoint, tmp_path, monkeypatch):
    keys = [key(dataclasses.replace(config, dtype=dtype), checkpoint) for dtype in ("float32", "bfloat16")]
    keys.append(key(dataclasses.replace(config, quantize="int8"), checkpoint))
    hub = dataclasses.replace(config, model_id="someone/llama")
    of_hub = Manifest("llama", None, ())
    keys += [cache_key(hub, Path("snapshots") / commit, of_hub) for commit in ("c0ffee", "decade")]
    code = save_checkpoint(tmp_path / "code", llama())
    keys.append(key(dataclasses.replace(config, model_id=str(code)), edit_config(code, auto_map={})))
    (code / "modeling.py").write_text("1")
    keys.append(key(dataclasses.replace(config, model_id=str(code)), code))
    keys.append(key(dataclasses.replace(config, model_id=str(code), trust_remote_code=True), code))
    monkeypatch.setattr("models.cache.version", lambda package: "another")
    keys.append(key(config, checkpoint))
    monkeypatch.setattr("models.cache.CONVERTER_VERSION", -1)
    keys.append(key(config, checkpoint))
    assert len(set(keys)) == len(keys)


def test_a_compressed_model_in_the_cache_is_found_without_nncf(config, checkpoint, monkeypatch):
    int8 = dataclasses.replace(config, quantize="int8")
    with_nncf = key(int8, checkpoint)
    versions = {"nncf": None}
    monkeypatch.setattr("models.cache.installed", lambda package: versions.get(package, models.cache.version(package)))
    assert key(int8, checkpoint) == with_nncf


def test_a_model_whose_code_comes_from_another_repository_is_not_kept(tmp_path, copies, caplog):
    """That code is not part of the checkpoint, so a changed one would not change the key."""
    folder = save_checkpoint(tmp_path / "model", llama())
    edit_config(folder, auto_map={"AutoModelForCausalLM": "someone/code--modeling.Own"})
    config = settings(folder, trust_remote_code=True)
    assert load(config).engine == "openvino"
    assert not list(Path(config.model_cache).glob("model-*"))
    assert "the next startup converts them again: its code comes from another repository" in caplog.text


@pytest.mark.parametrize("damage", ["model.bin", "model.xml", "entry.json", "logits"])
def test_a_damaged_entry_is_converted_anew_with_one_warning(config, copies, caplog, damage):
    load(config)
    (entry,) = Path(config.model_cache).glob("model-*")
    if damage == "logits":
        facts = read_entry(entry)
        facts["reference"]["logits"][5][0] += 1
        write_entry(entry, facts)
    else:
        os.truncate(entry / damage, (entry / damage).stat().st_size // 2)
    assert load(config).engine == "openvino"
    assert len(copies) == 2
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "is damaged" in caplog.text and "converting again" in caplog.text


@pytest.fixture
def shipped(config, copies, tmp_path, monkeypatch):
    """An entry that came with the image, whose folder cannot be written."""
    load(dataclasses.replace(config, model_cache=str(tmp_path / "image")))
    copies.clear()
    monkeypatch.setattr("models.cache.SHIPPED", tmp_path / "image")
    (folder,) = (tmp_path / "image").glob("model-*")
    remove = shutil.rmtree
    monkeypatch.setattr("shutil.rmtree", lambda path, **how: None if path == folder else remove(path, **how))
    return folder


def test_a_model_that_came_with_the_image_is_not_converted_and_nothing_in_the_image_changes(config, copies, shipped):
    os.utime(shipped / "entry.json", (1, 1))
    assert load(config).engine == "openvino"
    assert copies == []
    assert (shipped / "entry.json").stat().st_mtime == 1


def test_a_damaged_model_of_the_image_is_converted_once_though_it_cannot_be_removed(config, copies, shipped, caplog):
    os.truncate(shipped / "model.bin", 100)
    assert [load(config).engine for _start in range(2)] == ["openvino", "openvino"]
    assert len(copies) == 1
    assert caplog.text.count("is damaged") == 2


def test_a_model_that_does_not_convert_is_not_tried_again(config, converter, conversions, monkeypatch, caplog):
    def fail(model, **options):
        raise RuntimeError("Exception from somewhere:\nNo conversion rule for aten::frobnicate\n")

    monkeypatch.setattr(converter, "trace", fail)
    assert [load(config).engine for _start in range(2)] == ["torch", "torch"]
    assert len(conversions) == 1
    assert caplog.text.count("plain PyTorch, slower: RuntimeError: No conversion rule for aten::frobnicate") == 2


# Says which engine serves, without loading it. Its child, the conversion, counts itself and ends in the given way.
START = """
import sys
from pathlib import Path
import models.cache
from config import Config
from manifest import Manifest
from models.openvino import OpenVino
models.cache.CONVERTER_VERSION = int(sys.argv[1])
config = Config.from_json(sys.stdin.read())
try:
    print(OpenVino(config, Path(config.model_id), Manifest.read(config.model_id)).load(lambda phase: None))
except models.cache.NotConverted as error:
    print(f"plain PyTorch: {error}")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
CONVERSION = """
import os, sys
if "models.convert" in sys.orig_argv:
    open(os.environ["COUNT"], "a").write("1")
    {}
"""


@pytest.fixture
def start(config, tmp_path, monkeypatch):
    """Starts a process that loads the model, whose conversion does `what`; returns its line, and how many were converted."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))
    (tmp_path / "count").touch()

    def run(what: str, converter: int = models.cache.CONVERTER_VERSION) -> tuple[str, int]:
        (tmp_path / "sitecustomize.py").write_text(CONVERSION.format(what))
        command = [sys.executable, "-c", START, str(converter)]
        done = subprocess.run(command, input=config.to_json(), capture_output=True, text=True, cwd=HERE, check=True)
        return done.stdout.strip(), len((tmp_path / "count").read_text())

    return run


def test_a_conversion_that_crashes_is_not_tried_again_by_later_starts_of_the_same_version(start):
    crash = "os.kill(os.getpid(), 11)"
    line = "plain PyTorch: the conversion crashed (SIGSEGV)"
    assert [start(crash), start(crash)] == [(line, 1), (line, 1)]
    assert start(crash, converter=-1) == (line, 2)


@pytest.mark.parametrize(
    ("what", "how"), [("os.kill(os.getpid(), 9)", "was killed (SIGKILL)"), ("os._exit(12)", "ran out of memory")]
)
def test_a_conversion_without_the_memory_ends_each_start_in_one_line_and_the_next_tries_again(start, what, how):
    for conversions in (1, 2):
        line, count = start(what)
        assert line.startswith("ConfigError: the conversion of ") and f" {how}: it needs 1 GB and 1.2 to 2 times" in line
        assert count == conversions and "\n" not in line


def test_a_conversion_that_ends_otherwise_leaves_plain_pytorch_and_no_entry(start, config):
    line = "plain PyTorch: RuntimeError: the conversion failed: the process ended with code 1"
    assert start("os._exit(1)") == (line, 1)
    assert list(Path(config.model_cache).iterdir()) == []


def test_a_conversion_without_room_is_tried_once_more_in_the_temporary_folder(start):
    line, conversions = start("import shutil, types; shutil.disk_usage = lambda _: types.SimpleNamespace(free=0)")
    assert line.startswith("plain PyTorch: CannotWrite: ") and line.endswith(" has no room for 0.1 GB")
    assert conversions == 2


def test_an_error_of_the_system_that_is_not_about_the_cache_is_reported_after_one_conversion(start):
    missing = "def missing(*_): raise FileNotFoundError(2, 'gone', '/weights')\n    "
    line, conversions = start(f"{missing}import shutil; shutil.disk_usage = missing")
    assert line == "plain PyTorch: RuntimeError: the conversion failed: [Errno 2] gone: '/weights'"
    assert conversions == 1


def test_a_full_disk_leaves_plain_pytorch_and_a_line_that_says_so_and_the_next_start_converts(
    config, converter, conversions, monkeypatch, caplog
):
    free = SimpleNamespace(free=0)
    monkeypatch.setattr(converter.shutil, "disk_usage", lambda path: free)
    caplog.set_level("INFO", "model")
    assert load(config).engine == "torch"
    assert "GB of weights" not in caplog.text  # which are loaded only where there is room
    assert "runs in plain PyTorch, slower: CannotWrite: " in caplog.text and " has no room for 0.1 GB" in caplog.text
    free.free = 10**12
    assert load(config).engine == "openvino"


def test_a_checkpoint_in_float32_needs_room_for_its_weights_once(config, checkpoint, converter, conversions, monkeypatch):
    stored = (checkpoint / "model.safetensors").stat().st_size
    monkeypatch.setattr(converter.shutil, "disk_usage", lambda _: SimpleNamespace(free=converter.SPARE_BYTES + stored))
    assert load(config).engine == "openvino"


def test_weights_in_another_format_beside_those_that_are_read_need_no_room(config, checkpoint, conversions, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    for name in ("consolidated.safetensors", "pytorch_model.bin"):
        (folder / name).touch()
        os.truncate(folder / name, 10**13)
    assert load(dataclasses.replace(config, model_id=str(folder))).engine == "openvino"


OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    RuntimeError("Exception from somewhere:\nFailed to allocate 221184 bytes of memory\n"),
    RuntimeError("std::bad_alloc"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_a_converter_that_runs_out_of_memory_says_so_by_its_exit_code(checkpoint, converter, tmp_path, monkeypatch, error):
    def fill_memory(model, **options):
        raise error

    monkeypatch.setattr(converter, "trace", fill_memory)
    monkeypatch.setattr("logs.set_up", lambda *_: None)  # of pytest's process
    monkeypatch.setattr("sys.stdin", io.StringIO(settings(checkpoint).to_json()))
    assert models.convert.main([str(checkpoint), str(tmp_path)]) == errno.ENOMEM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
@pytest.mark.parametrize("explain", [contextlib.nullcontext, lambda: reported_as("it cannot be read")], ids=["plain", "told"])
def test_a_program_that_runs_out_of_memory_says_so_by_its_exit_code(monkeypatch, capsys, error, explain):
    """So an adapter that is loaded at run time is not rejected as a broken one."""

    def work():
        with explain():
            raise error

    monkeypatch.setattr("sys.argv", ["program"])
    with pytest.raises(SystemExit) as end:
        run_program(work)
    assert end.value.code == errno.ENOMEM
    assert type(error).__name__ in capsys.readouterr().err


def test_a_model_that_fails_at_its_first_start_is_not_converted_again(config, copies, monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(openvino_model, "OpenVinoModel", fail)
    assert [load(config).engine for _start in range(2)] == ["torch", "torch"]
    assert len(copies) == 1
    assert caplog.text.count("plain PyTorch, slower: RuntimeError: no kernel") == 2


def test_quantized_weights_that_do_not_convert_are_refused_without_another_conversion(
    config, converter, conversions, monkeypatch
):
    def fail(model, **options):
        raise RuntimeError("no rule")

    monkeypatch.setattr(converter, "trace", fail)
    for _start in range(2):
        with pytest.raises(ModelError, match=r"--quantize int8 .* only plain PyTorch serves .*: RuntimeError: no rule; leave"):
            load(dataclasses.replace(config, quantize="int8"))
    assert len(conversions) == 1


READ_ONLY = "/proc/no-such-folder"
CLOSED = "/proc" + 20 * f"/{'x' * 202}"  # the path of an entry is too long to be looked at


@pytest.mark.parametrize("folder", [READ_ONLY, CLOSED, None], ids=["read-only", "closed", "full"])
def test_a_cache_that_cannot_be_written_costs_a_warning(config, converter, conversions, monkeypatch, caplog, folder):
    if folder is None:
        free = lambda path: SimpleNamespace(free=0 if "cache" in str(path) else 10**12)  # noqa: E731
        monkeypatch.setattr(converter.shutil, "disk_usage", free)
    else:
        config = dataclasses.replace(config, model_cache=folder)
    assert load(config).engine == "openvino"
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "cannot be kept" in caplog.text


def test_too_many_slots_for_the_memory_are_refused_and_cost_no_converted_model(config, copies, monkeypatch):
    def fill_memory(*arguments):
        raise MemoryError("Unable to allocate 244. GiB")

    load(config)
    monkeypatch.setattr(openvino_model, "OpenVinoModel", fill_memory)
    with pytest.raises(ModelError, match=r"244. GiB\); lower --max-batch-size \(MAX_BATCH_SIZE\) or --max-total-tokens"):
        load(config)
    assert len(copies) == 1 and list(Path(config.model_cache).glob("model-*"))


def test_what_cannot_be_kept_is_converted_into_the_folder_of_the_run(config, entry, tmp_path, monkeypatch):
    """That folder is removed also when the worker is killed."""
    targets = []

    def convert(arguments, config):
        targets.append(Path(arguments[1]))
        shutil.copytree(entry, arguments[1], dirs_exist_ok=True)

    monkeypatch.setattr("models.openvino.run_converter", convert)
    monkeypatch.setenv("NEURON_TEXTGEN_RUN_DIR", str(tmp_path))
    load(dataclasses.replace(config, model_cache="/proc/no-such-folder"))
    assert [target.parent for target in targets] == [tmp_path]


def test_one_process_converts_and_the_other_waits_and_says_so(tmp_path, monkeypatch):
    cache, made, said, waits = cache_in(tmp_path), [], [], threading.Event()
    monkeypatch.setattr(models.cache.logger, "info", lambda message, *values: (said.append(message % values), waits.set()))

    def convert(folder):
        made.append(folder)
        write_entry(folder, {})

    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=cache.find_or_add, args=("model-a", convert))
        other.start()
        assert waits.wait(60)
        (tmp_path / "model-a").mkdir()
        write_entry(tmp_path / "model-a", {})
    other.join(60)
    assert made == []
    assert said[0].startswith("Another process is converting a model")


def test_a_conversion_that_was_killed_leaves_nothing_behind(tmp_path):
    killed = "import os, sys; from pathlib import Path; from models.cache import renamed_when_complete\n"
    killed += "with renamed_when_complete(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed, str(tmp_path / "model-a")], cwd=HERE)
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock", ".new"}
    with pytest.raises(ZeroDivisionError):
        cache_in(tmp_path).find_or_add("model-a", lambda folder: 1 / 0)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_process_is_still_writing_is_left_alone(tmp_path):
    with renamed_when_complete(tmp_path / "first") as first:
        (first / "half").touch()
        with renamed_when_complete(tmp_path / "second"):
            assert (first / "half").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


def test_the_least_recently_used_entries_go_first(tmp_path):
    cache = cache_in(tmp_path, 2500e-9)

    def convert(folder):
        (folder / "model.bin").write_bytes(bytes(1000))
        write_entry(folder, {})

    for age, key in enumerate(("model-a", "tokenizer-b", "model-c")):
        os.utime(cache.find_or_add(key, convert) / "entry.json", (age, age))
        if key == "tokenizer-b":
            cache.find("model-a")
    assert {path.name for path in tmp_path.iterdir()} == {"model-a", "model-c"}


HOLD = """
import sys
from models.cache import UNTIL_EXIT, ModelCache, write_entry
from config import Config
cache = ModelCache(Config(model_cache=sys.argv[1], model_cache_size=1e-9))
print(cache.hold("model-a", lambda folder: write_entry(folder, {}), UNTIL_EXIT), flush=True)
sys.stdin.read()
"""


def test_an_entry_that_a_process_uses_stays_and_its_lock_goes_with_it(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE) as other:
        held = Path(other.stdout.readline().strip())
        cache = cache_in(tmp_path, 1e-9)
        cache.find_or_add("model-b", lambda folder: write_entry(folder, {}))
        assert held.is_dir()
        other.stdin.close()
        other.wait()
    os.utime(held / "entry.json", (0, 0))
    cache.find_or_add("lora-c", lambda folder: write_entry(folder, {}))
    assert [path.name for path in tmp_path.iterdir()] == ["lora-c"]


def test_a_lock_is_not_that_of_a_file_that_its_last_holder_has_removed(tmp_path, monkeypatch):
    """Another process would lock a new file beside it."""
    waits = threading.Event()
    monkeypatch.setattr(models.cache.logger, "info", lambda *_: waits.set())
    held = []

    def hold():
        with locked(tmp_path / "lock", "making"):
            held.append((tmp_path / "lock").exists())

    with locked(tmp_path / "lock", "making"):
        other = threading.Thread(target=hold)
        other.start()
        assert waits.wait(60)
    other.join(60)
    assert held == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_may_write_to_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"--model-cache .*\(MODEL_CACHE\) can be written to by other users"):
        cache_in(tmp_path)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"--model-cache .*\(MODEL_CACHE\) belongs to user"):
        cache_in(tmp_path)
