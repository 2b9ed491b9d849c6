"""What is downloaded from the hub, of which commit and with which token, and the one line for everything that fails.

The hub's library is the real one; the hub is in this process. See fakes/hub.py.
"""

import contextlib
import errno
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from fakes.hub import READER, STRANGER, WAIT_S, forget_connections
from huggingface_hub import constants
from processes import Server, wait_until
from safetensors.numpy import save_file

import models
from config import DEMO_MODEL, Config
from models.checkpoint.fetch import adapter_shapes, fetch, fetch_adapter, fetch_artifact, fetch_checkpoint, fetch_weights
from models.errors import ModelError, progress
from models.neuron import plan
from models.neuron.artifact import Artifact
from run import HERE, ConfigError

FACTS = ["chat_template.jinja", "config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "vocab.txt"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
PICKLED = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
CODE = ["modeling_own.py"]
NEVER = [
    "README.md",
    "consolidated.00.pth",
    "consolidated.safetensors",
    "flax_model.msgpack",
    "onnx/config.json",
    "onnx/model.onnx",
    "original/consolidated.safetensors",
    "training_args.bin",
]


def files(*groups, **contents):
    return {name: f"the content of {name}".encode() for group in groups for name in group} | contents


@pytest.fixture
def config():
    return Config(model_id="someone/model")


@pytest.fixture
def no_pauses(monkeypatch):
    """The library waits a second before it tries again."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def go_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    forget_connections()


def refusal(config):
    with pytest.raises(ModelError) as caught:
        folder, _commit = fetch(config)
        fetch_weights(config, folder)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and READER not in message
    return message


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_facts_come_first_and_the_weights_when_they_are_wanted(hub, config):
    commit = hub.push("someone/model", files(FACTS, SHARDS, PICKLED, CODE, NEVER))
    folder, sha = fetch(config)
    assert (sha, folder.name) == (commit, commit)
    assert hub.fetched == names(folder) == FACTS
    assert fetch_weights(config, folder) == folder
    assert hub.fetched == names(folder) == sorted(FACTS + SHARDS)
    assert (folder / SHARDS[0]).read_text() == f"the content of {SHARDS[0]}"


def test_pickled_weights_are_fetched_only_where_there_are_no_others(hub, config):
    hub.push("someone/model", files(FACTS, PICKLED, NEVER))
    fetch_weights(config, fetch(config)[0])
    assert hub.fetched == sorted(FACTS + PICKLED)


def test_a_checkpoint_that_was_split_into_a_file_for_each_tensor_is_fetched(hub, config):
    split = ["pytorch_model.bin/key_to_filename.json", "pytorch_model.bin/p0.lm_head.weight"]
    hub.push("someone/model", files(FACTS, split, NEVER))
    folder, _commit = fetch(config)
    assert hub.fetched == FACTS
    assert names(fetch_weights(config, folder)) == sorted(FACTS + split)


@pytest.mark.models
@pytest.mark.usefixtures("no_children")
def test_pickled_weights_are_not_downloaded_for_a_cpu_which_does_not_read_them(hub, config):
    hub.push("someone/model", files(FACTS, PICKLED, NEVER, **{"config.json": b'{"model_type": "llama"}'}))
    prepared = models.prepare(replace(config, device="cpu"))
    with pytest.raises(ModelError, match=r"someone/model holds no weights: there is no \*.safetensors$"):
        prepared.fetch_weights()
    assert hub.fetched == FACTS


LENGTH = {"max_total_tokens": 8193, "max_input_tokens": 1}
LLAMA_4 = {"model_type": "llama4", "text_config": {"attention_chunk_size": 8192}, "vision_config": {}}


@pytest.mark.models
@pytest.mark.usefixtures("no_children")
@pytest.mark.parametrize(
    ("device", "facts", "settings", "why"),
    [
        ("cpu", {"model_type": "zamba2"}, {}, "zamba2 models with attention shared by layers are not supported"),
        ("cuda", {"model_type": "kimi_linear"}, {}, "kimi_linear models with linear attention that decays by channel"),
        ("cpu", {"model_type": "own", "auto_map": {}}, {}, r"own models come with Python code; --trust-remote-code"),
        ("cpu", LLAMA_4, LENGTH, r"beyond 8192 tokens; give --max-total-tokens 8192 or less"),
    ],
)
def test_what_config_json_rules_out_is_refused_before_the_download(hub, config, tmp_path, device, facts, settings, why):
    hub.push("someone/model", files(FACTS, SHARDS, **{"config.json": json.dumps(facts).encode()}))
    prepared = models.prepare(replace(config, device="cpu", model_cache=str(tmp_path / "cache"), **settings))
    with pytest.raises(ConfigError, match=why):
        engine = next(engine for engine in models.ENGINES if engine.device == device)
        engine(prepared.config, prepared.folder, prepared.manifest).fetch_weights()
    assert not set(SHARDS) & set(hub.fetched)


@pytest.mark.models
@pytest.mark.usefixtures("no_children")
def test_the_base_of_an_adapter_is_refused_before_its_download(hub, config, tmp_path):
    hub.push("someone/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    hub.push("someone/model", files(FACTS, SHARDS, **{"config.json": b'{"model_type": "bloom"}'}))
    given = replace(config, device="cpu", model_cache=str(tmp_path / "cache"), merge_lora="someone/adapter=someone/adapter")
    with pytest.raises(ConfigError, match="bloom models with ALiBi"):
        models.prepare(given)
    assert not set(SHARDS) & set(hub.fetched)


@pytest.mark.parametrize("is_offline", [True, False], ids=["HF_HUB_OFFLINE", "no network"])
def test_the_shapes_of_an_adapter_are_read_without_a_download_and_from_the_cache_without_a_network(
    hub, config, tmp_path, monkeypatch, is_offline
):
    (tmp_path / "b").mkdir()
    tensors = {"q_proj.lora_A.weight": np.zeros((16, 8)), "q_proj.lora_B.weight": np.zeros((4, 16))}
    save_file(tensors, tmp_path / "b" / "adapter_model.safetensors")
    commit = hub.push("someone/b", tmp_path / "b", tag="v1")
    sources = (str(tmp_path / "b"), "someone/b", "someone/b@v1")
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert [adapter_shapes(config, source) for source in sources] == [shapes] * 3
    assert not list(tmp_path.rglob(f"**/{commit}/*"))
    for source in sources:
        fetch_adapter(config, source)
    hub.close()
    forget_connections()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    assert [adapter_shapes(config, source) for source in sources] == [shapes] * 3


def test_what_needs_a_missing_package_is_refused_before_the_download(hub, config, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nncf" else find(name))
    hub.push("someone/model", files(FACTS, SHARDS, **{"config.json": b'{"model_type": "llama"}'}))
    prepared = models.prepare(replace(config, device="cpu", model_cache=str(tmp_path / "cache"), quantize="int8"))
    with pytest.raises(ModelError, match=r"--quantize int8 \(QUANTIZE\) needs nncf .*pip install"):
        prepared.fetch_weights()
    assert not set(SHARDS) & set(hub.fetched)


@pytest.mark.models
@pytest.mark.usefixtures("no_children")
@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_a_model_whose_text_part_is_served_is_not_refused_for_its_other_part(hub, config, tmp_path, kind):
    facts = {"model_type": kind, "vision_config": {}, "text_config": {}}
    hub.push("someone/model", files(FACTS, SHARDS, **{"config.json": json.dumps(facts).encode()}))
    models.prepare(replace(config, device="cpu", model_cache=str(tmp_path / "cache"))).fetch_weights()
    assert set(SHARDS) <= set(hub.fetched)


@pytest.mark.models
def test_a_model_whose_weights_are_there_is_not_checked_again(hub, config, tmp_path, monkeypatch):
    hub.push("someone/model", files(FACTS, SHARDS, **{"config.json": b'{"model_type": "bloom"}'}))
    fetch_weights(config, fetch(config)[0])
    models.prepare(replace(config, device="cpu", model_cache=str(tmp_path / "cache"))).fetch_weights()


def test_code_is_fetched_only_where_it_is_trusted(hub):
    hub.push("someone/model", files(FACTS, CODE, NEVER))
    fetch(Config(model_id="someone/model", trust_remote_code=True))
    assert hub.fetched == sorted(FACTS + CODE)


def test_a_model_without_weights_is_refused_by_name(hub, config):
    hub.push("someone/model", files(FACTS, NEVER))
    missing = "there is no *.safetensors and no pytorch_model.bin/* and no pytorch_model*.bin"
    assert refusal(config) == f"someone/model holds no weights: {missing}"


def test_files_in_gguf_beside_a_config_json_are_named(hub, config):
    """As in repositories of unsloth."""
    hub.push("someone/model", files(FACTS, ["model-Q4_K_M.gguf", "model-Q8_0.gguf", "model-BF16-00001-of-00002.gguf"]))
    hint = (
        "; for a GGUF file name it: --model-id someone/model:model-BF16-00001-of-00002.gguf; "
        "there are also model-Q4_K_M.gguf, model-Q8_0.gguf"
    )
    assert refusal(config).endswith(hint)


def test_the_weights_are_of_the_commit_that_the_facts_are_of(hub, config):
    hub.push("someone/model", files(FACTS, **{"model.safetensors": b"old"}))
    folder, _commit = fetch(config)
    hub.push("someone/model", files(FACTS, **{"model.safetensors": b"new"}))
    assert (fetch_weights(config, folder) / "model.safetensors").read_bytes() == b"old"


@pytest.mark.parametrize("kind", ["branch", "tag", "commit"])
def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, kind):
    wanted = hub.push("someone/model", files(FACTS, SHARDS), branch="a/branch", tag="v1.0")
    hub.push("someone/model", files(FACTS, SHARDS))
    config = Config(model_id="someone/model", revision={"branch": "a/branch", "tag": "v1.0", "commit": wanted}[kind])
    folder, sha = fetch(config)
    fetch_weights(config, folder)
    assert sha == wanted
    assert names(folder) == sorted(FACTS + SHARDS)


def test_what_is_in_the_cache_is_not_fetched_again(hub, config):
    hub.push("someone/model", files(FACTS, SHARDS))
    fetch_weights(config, fetch(config)[0])
    hub.asked.clear()
    fetch_weights(config, fetch(config)[0])
    assert hub.fetched == []


def test_a_hub_that_is_down_does_not_matter_where_the_cache_has_everything(hub, config):
    commit = hub.push("someone/model", files(FACTS, SHARDS))
    fetch_weights(config, fetch(config)[0])
    hub.close()
    folder, sha = fetch(config)
    assert (sha, names(fetch_weights(config, folder))) == (commit, sorted(FACTS + SHARDS))


def test_a_compiled_model_brings_its_programs_and_its_weights(hub, config):
    own = ["checkpoint/model.safetensors", "compiled/model.neff", "compiled/more/model.neff"]
    hub.push("someone/model", files(FACTS, own, NEVER))
    folder, _commit = fetch(config)
    assert hub.fetched == FACTS
    fetch_artifact(config, folder, ["checkpoint"])
    assert names(folder) == sorted([*FACTS, own[0]])
    fetch_artifact(config, folder, ["compiled", "checkpoint"])
    assert names(folder) == sorted(FACTS + own)


def test_a_compiled_model_without_weights_names_the_commit_to_fetch_them_of(hub, config):
    wanted = hub.push("someone/base", files(FACTS, NEVER, **{"model.safetensors": b"old"}))
    hub.push("someone/base", files(FACTS, **{"model.safetensors": b"new"}))
    section = {"batch_size": 2, "sequence_length": 64, "num_cores": 2, "auto_cast_type": "bf16", "compiler_version": "2"}
    section |= {"checkpoint_id": "someone/base", "checkpoint_revision": wanted}
    compiled = {"config.json": json.dumps({"model_type": "llama", "neuron": section}).encode(), "compiled/a.neff": b"a"}
    hub.push("someone/model", compiled)
    folder, _commit = fetch(config)
    artifact = Artifact.of(json.loads((folder / "config.json").read_text()), folder / "config.json")
    checkpoint = fetch_checkpoint(config, artifact.checkpoint_id, artifact.checkpoint_revision)
    assert names(checkpoint) == sorted([*FACTS, "model.safetensors"])
    assert (checkpoint / "model.safetensors").read_bytes() == b"old"


@pytest.mark.parametrize("access", ["private", "gated"])
@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN"])
def test_a_token_opens_what_is_closed_and_goes_to_the_hub_alone(hub, config, monkeypatch, access, name):
    hub.push("someone/model", files(FACTS, SHARDS), access=access)
    monkeypatch.setenv(name, READER)
    fetch_weights(config, fetch(config)[0])
    assert {asked.token for asked in hub.asked if not asked.host.startswith("localhost")} == {READER}
    assert {asked.token for asked in hub.asked if asked.host.startswith("localhost")} == {None}


HIDDEN = (
    "the hub has no such model: check the spelling of --model-id (MODEL_ID) or of the adapter; if it is private, give a "
    "token with read access in HF_TOKEN"
)
GATED = "it is gated: request access on its page, and give a token of that account in HF_TOKEN"
BAD_TOKEN = "the hub rejects the token: give a valid one in HF_TOKEN, or none for a public model"


@pytest.mark.parametrize(
    "access, token, why",
    [
        ("private", None, HIDDEN),
        ("private", STRANGER, HIDDEN),
        ("gated", None, GATED),
        ("gated", STRANGER, GATED),
        ("forbidden", STRANGER, "the hub denies access: give a token with read access in HF_TOKEN"),
        ("public", "hf_TypedWrong", BAD_TOKEN),
    ],
)
def test_what_may_not_be_read_is_refused_with_what_would_help(hub, config, monkeypatch, capsys, access, token, why):
    hub.push("someone/model", files(FACTS, SHARDS), access=access)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert refusal(config) == f"someone/model cannot be downloaded: {why}"
    assert plan.main(["--model-id", "someone/model"]) == 2
    assert capsys.readouterr().err == f"error: someone/model cannot be downloaded: {why}\n"


@pytest.mark.parametrize("token", [None, STRANGER])
def test_a_model_that_is_not_there_is_refused(hub, config, monkeypatch, token):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert refusal(config) == f"someone/model cannot be downloaded: {HIDDEN}"


@pytest.mark.parametrize("revision", ["v2", "0" * 40])
def test_a_revision_that_is_not_there_is_named(hub, capsys, revision):
    hub.push("someone/model", files(FACTS, SHARDS))
    why = f"it has no branch, tag or commit '{revision}': check --revision (REVISION), or what follows the @ of the adapter"
    assert refusal(Config(model_id="someone/model", revision=revision)) == f"someone/model cannot be downloaded: {why}"
    assert plan.main(["--model-id", "someone/model", "--revision", revision]) == 2
    assert capsys.readouterr().err == f"error: someone/model cannot be downloaded: {why}\n"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("someone/none", r"MODEL_ID\) or of the adapter"),
        ("someone/b@v9", "'v9': .* the @ of the adapter"),
        ("a/b/c", "adapters have to be folders or hub ids"),
    ],
)
@pytest.mark.parametrize("ask", [fetch_adapter, adapter_shapes])
def test_an_adapter_that_is_not_there_is_not_taken_for_the_model(hub, config, ask, source, what):
    hub.push("someone/b", {"adapter_config.json": b"{}"})
    with pytest.raises(ModelError, match=f"cannot be downloaded: .*{what}"):
        ask(config, source)


def test_what_cannot_be_an_id_is_refused(hub):
    message = refusal(Config(model_id="some one/model"))
    assert "some one/model cannot be downloaded: --model-id (MODEL_ID) and adapters have to be folders or hub ids: " in message


@pytest.mark.parametrize("status", [500, 503])
def test_a_failing_hub_is_reported_with_its_status(hub, config, status, no_pauses):
    hub.status = status
    assert refusal(config) == f"someone/model cannot be downloaded: the hub answers with status {status}: try again later"


def test_the_rate_limit_of_the_hub_is_reported(hub, config, no_pauses):
    hub.status = 429
    assert "wait, or give a token in HF_TOKEN" in refusal(config)


def test_a_hub_that_cannot_be_reached_is_reported(hub, config, no_pauses):
    hub.close()
    message = refusal(config)
    assert message.startswith("someone/model cannot be downloaded: it is not in the cache, and the hub cannot be reached (Conn")
    assert message.endswith("; check the network, or give a local folder")


def test_templates_for_tools_are_fetched_from_their_folder(hub, config):
    template = "additional_chat_templates/tool_use.jinja"
    hub.push("someone/model", files(FACTS, [template, "onnx/other.jinja"]))
    folder, _commit = fetch(config)
    assert (folder / template).is_file()
    assert hub.fetched == sorted([*FACTS, template])


def test_offline_what_is_not_in_the_cache_is_refused(hub, config, monkeypatch):
    go_offline(monkeypatch)
    assert "it is not in the cache, and HF_HUB_OFFLINE is set" in refusal(config)
    assert hub.asked == []


def test_offline_a_cache_without_the_weights_is_refused(hub, config, monkeypatch):
    hub.push("someone/model", files(FACTS, SHARDS))
    fetch(config)
    go_offline(monkeypatch)
    assert "HF_HUB_OFFLINE is set" in refusal(config)


def test_an_answer_that_is_no_hubs_is_refused(hub, config):
    hub.status = 200
    assert refusal(config).startswith("someone/model cannot be downloaded: ")


@pytest.mark.skipif(huggingface_hub.__version__.startswith("0."), reason="0.36 gives up, and goes on at the next start")
def test_a_download_resumes_after_a_lost_connection(hub, config, no_pauses):
    hub.push("someone/model", {"config.json": b"{}", "model.safetensors": b"0123456789" * 1000})
    hub.fail("model.safetensors", "cut", times=3)
    folder = fetch_weights(config, fetch(config)[0])
    assert (folder / "model.safetensors").read_bytes() == b"0123456789" * 1000


@pytest.mark.parametrize("kind", ["cut", "reset", "error"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_download_that_fails_is_reported_in_one_line_and_succeeds_at_the_next_start(hub, config, no_pauses, file, kind):
    hub.push("someone/model", {"config.json": b"1", "model.safetensors": b"1"})
    hub.fail(file, kind, times=100)
    assert refusal(config).startswith("someone/model cannot be downloaded: ")
    hub.faults.clear()
    assert (fetch_weights(config, fetch(config)[0]) / file).read_bytes() == b"1"


def kept_in(folder):
    return Config(model_id="someone/model", huggingface_hub_cache=str(folder))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS], ids=errno.errorcode.get)
def test_a_cache_that_may_not_be_written_is_named_with_the_user_and_the_remedy(hub, tmp_path, monkeypatch, number):
    hub.push("someone/model", files(FACTS, SHARDS))
    cache, mkdir = tmp_path / "cache", os.mkdir

    def refuse(path, *how, **named):
        if Path(path).is_relative_to(cache):
            raise OSError(number, os.strerror(number), str(path))
        mkdir(path, *how, **named)

    monkeypatch.setattr(os, "mkdir", refuse)
    assert re.fullmatch(
        f"someone/model cannot be downloaded: {cache}\\S* cannot be used by user {os.geteuid()} \\({os.strerror(number)}\\); "
        r"give that user the folder \(chown\), or another one with --huggingface-hub-cache \(HF_HUB_CACHE\) or HF_HOME",
        refusal(kept_in(cache)),
    )


def test_a_file_where_the_cache_should_be_is_named(hub, tmp_path):
    hub.push("someone/model", files(FACTS, SHARDS))
    (tmp_path / "cache").write_text("in the way")
    message = refusal(kept_in(tmp_path / "cache"))
    assert message.startswith(f"someone/model cannot be downloaded: {tmp_path / 'cache'}")
    assert "--huggingface-hub-cache" in message


@pytest.mark.parametrize("is_terminal", [False, True])
def test_while_a_download_goes_on_the_log_or_a_bar_and_the_status_say_how_much_is_there(
    hub, config, monkeypatch, caplog, is_terminal
):
    monkeypatch.setattr("models.errors.PROGRESS_S", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)  # where huggingface_hub draws a bar
    caplog.set_level(logging.INFO)
    hub.push("someone/model", files(FACTS) | {name: bytes(3_000_000) + name.encode() for name in SHARDS})
    folder, _commit = fetch(config)
    hub.fail(SHARDS[1], "hang")
    fetching = threading.Thread(target=fetch_weights, args=(config, folder))
    fetching.start()
    half = r"downloading someone/model after \d+ s: 3 of 6 MB \(50 %\)"
    wait_until(lambda: re.fullmatch(half, progress.text), "half of it in the status")
    if not is_terminal:
        wait_until(lambda: re.search(f"Still {half}", caplog.text), "half of it in the log")
    hub.may_go_on.set()
    fetching.join()
    assert progress.text == ""
    assert ("Still" in caplog.text) != is_terminal
    assert (folder / SHARDS[1]).exists()


def test_plan_fetches_the_config_and_nothing_else(hub, capsys, monkeypatch):
    hub.push("someone/demo", DEMO_MODEL, access="private")
    monkeypatch.setenv("HF_API_TOKEN", READER)
    assert plan.main(["--model-id", "someone/demo"]) == 0
    assert hub.fetched == ["config.json"]
    assert "parameters in bfloat16" in capsys.readouterr().out


def test_plan_names_the_file_that_is_not_there(hub, capsys):
    hub.push("someone/model", {"README.md": b"no model"})
    assert plan.main(["--model-id", "someone/model"]) == 2
    assert capsys.readouterr().err.endswith(" is not a model folder: it has no config.json\n")


# The whole server.


@pytest.mark.processes
def test_a_private_model_of_a_tag_is_downloaded_and_served_and_the_next_start_needs_no_hub(hub, tmp_path):
    commit = hub.push("someone/demo", DEMO_MODEL, tag="v1", access="private")
    hub.push("someone/demo", {"README.md": b"all gone"})
    hub.fail("model.safetensors", "hang")
    flags = ("--model-id", "someone/demo", "--revision", "v1")
    with Server(*flags, **hub.environment(tmp_path, HF_TOKEN=READER, LOG_LEVEL="debug")) as server:
        wait_until(hub.hangs.is_set, "the weights are requested")
        wait_until(lambda: health(server) == (503, "downloading"), "/health says that it downloads")
        hub.may_go_on.set()
        server.wait_ready()
        info = json.loads(server.get("/info")[1])
        assert (info["model_id"], info["model_sha"]) == ("someone/demo", commit)
        assert "learning" in server.generate("What is Deep Learning?")[1]["generated_text"].lower()
        assert server.stop() == 0
        assert "Downloading the weights of someone/demo" in server.log and READER not in server.log
        assert "signature" not in server.log, "addresses of the hub are signed"
    hub.close()
    with Server(*flags, **hub.environment(tmp_path, HF_HUB_OFFLINE="1")) as server:
        server.wait_ready()
        assert json.loads(server.get("/info")[1])["model_sha"] == commit
        assert server.generate("Hello")[0] == 200
        assert server.stop() == 0


def health(server):
    with contextlib.suppress(OSError):  # no process listens yet
        status, body = server.get("/health")
        return status, json.loads(body)["phase"]


@pytest.mark.processes
def test_sigterm_ends_a_download_at_once(hub, tmp_path):
    hub.push("someone/demo", DEMO_MODEL)
    hub.fail("model.safetensors", "hang")
    # On a simulated device, where no child process checks the model before.
    device = {"DEVICE": "neuron", "NEURON_RT_NUM_CORES": "2", "PYTHONPATH": str(HERE / "bench" / "simulated")}
    with Server("--model-id", "someone/demo", **hub.environment(tmp_path, **device)) as server:
        wait_until(hub.hangs.is_set, "the weights are asked for")
        asked_at = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert time.monotonic() - asked_at < WAIT_S / 2, "it waited for the hub"
