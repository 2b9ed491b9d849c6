"""Which device serves a model, and the settings that are rejected by name where they have no effect."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import config
import models
from config import DEMO_MODEL, Config
from models.base import StaticBatchModel
from models.errors import ModelError
from run import HERE, ConfigError


def refusal(**settings) -> str:
    """The one line that the user reads."""
    with pytest.raises(ModelError) as caught:
        models.prepare(Config(model_id=str(DEMO_MODEL), **settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_each_device_has_its_engine():
    assert tuple(engine.device for engine in models.ENGINES) == config.DEVICES


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_compressed_weights_are_refused_on_a_gpu_before_a_download(monkeypatch, quantize):
    monkeypatch.setattr(models.PyTorch, "is_here", lambda wanted: True)
    why = "neuron-textgen/demo runs in plain PyTorch, where weights stay as they are; leave it out"
    assert refusal(device="cuda", quantize=quantize) == f"--quantize {quantize} (QUANTIZE): {why}"


@pytest.mark.parametrize("device", ["cuda", "neuron"])
@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--kv-cache-dtype u8 (KV_CACHE_DTYPE)", {"kv_cache_dtype": "u8"}),
        ("--prefix-slots 9 (PREFIX_SLOTS)", {"prefix_slots": 9}),
    ],
)
def test_a_setting_for_openvino_is_refused_elsewhere_by_name(monkeypatch, device, flag, setting):
    monkeypatch.setattr(models.PyTorch, "is_here", lambda wanted: True)
    engine = {"cuda": "plain PyTorch", "neuron": "Neuron"}[device]
    why = f"is for OpenVINO on CPUs, and neuron-textgen/demo is served by {engine}; leave it out"
    assert refusal(device=device, **setting) == f"{flag} {why}"


@pytest.mark.skipif(any(Path("/dev").glob("nvidia*")), reason="this machine has a GPU")
def test_cuda_is_refused_where_there_is_none():
    assert refusal(device="cuda") == "--device cuda: torch finds no CUDA GPU on this machine; use --device cpu or auto"


def test_cuda_without_torch_is_refused_by_what_is_missing(monkeypatch):
    monkeypatch.setattr("models.pytorch.find_spec", lambda package: None)
    assert refusal(device="cuda") == "--device cuda: torch is not installed here; use --device cpu or auto"


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--tp-degree (TP_DEGREE)", {"tp_degree": 2}),
        ("--prefill-buckets (PREFILL_BUCKETS)", {"prefill_buckets": (8,)}),
        ("--position-buckets (POSITION_BUCKETS)", {"position_buckets": (8,)}),
        ("--prefill-chunk (PREFILL_CHUNK)", {"prefill_chunk": 128}),
        ("--compile-workers (COMPILE_WORKERS)", {"compile_workers": 1}),
        ("--sampling device (SAMPLING)", {"sampling": "device"}),
        ("--kv-cache-dtype fp8_e4m3fn (KV_CACHE_DTYPE)", {"kv_cache_dtype": "fp8_e4m3fn"}),
    ],
)
def test_a_setting_for_neuron_is_refused_elsewhere_by_name(flag, setting):
    why = "is for Neuron, and neuron-textgen/demo is served by OpenVINO on CPUs; leave it out"
    assert refusal(device="cpu", **setting) == f"{flag} {why}"


def test_a_model_is_not_split_elsewhere_and_one_shard_is_no_split():
    assert refusal(device="cpu", **{"tp_degree": config.parse([], {"NUM_SHARD": "2"}).tp_degree}).startswith("--tp-degree")
    one = config.parse(["--num-shard", "1", "--sharded", "false", "--device", "cpu"], {"SM_NUM_GPUS": "1"})
    assert models.prepare(one).device == "cpu"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 models are encoder-decoder models"),
        (
            {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"], "tie_word_embeddings": True},
            r"^Qwen3ForSequenceClassification \(architectures in config\.json\) generates no text; nothing to serve$",
        ),
    ],
)
def test_what_config_json_rules_out_is_refused_before_a_weight_is_read(tmp_path, facts, said):
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ModelError, match=said):
        models.prepare(Config(model_id=str(tmp_path), device="cpu"))


def test_weights_that_are_not_read_are_refused_before_a_library_is_imported(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle is never read")
    prepared = models.prepare(Config(model_id=str(tmp_path), device="cpu"))
    monkeypatch.setitem(sys.modules, "models.openvino.model", None)  # cannot be imported
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: it is pickled"):
        models.load(prepared, lambda phase: None)


@pytest.mark.parametrize(
    ("facts", "processor", "lines"),
    [
        ({"model_type": "qwen3_vl"}, {}, []),
        ({"model_type": "qwen3_vl", "vision_config": {}}, {}, [""]),
        ({"model_type": "qwen3_vl", "audio_config": {}}, {}, [""]),
        ({"model_type": "llava", "vision_config": {}}, {"image_processor_type": "CLIPImageProcessor"}, []),
        (
            {"model_type": "llava", "vision_config": {}},
            {"image_processor_type": "Other"},
            [r": its image_processor_type Other"],
        ),
        ({"model_type": "llava", "vision_config": {}}, {}, [": its folder has no preprocessor_config.json"]),
    ],
    ids=str,
)
def test_one_line_says_that_only_the_text_part_of_a_model_is_served(tmp_path, caplog, facts, processor, lines):
    caplog.set_level("INFO")
    (tmp_path / "config.json").write_text(json.dumps(facts))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    models.prepare(Config(model_id=str(tmp_path), device="cpu"))
    said = [record.getMessage() for record in caplog.records if "text part" in record.getMessage()]
    assert len(said) == len(lines)
    for line, why in zip(said, lines):
        assert line.startswith(f"{tmp_path}: only the text part of this model is served{why}")


def test_settings_left_open_are_filled_in_from_the_model():
    served = models.prepare(Config(model_id=str(DEMO_MODEL), device="cpu", sampling="host")).config
    assert served.max_total_tokens and served.max_input_tokens == served.max_total_tokens - 1


def test_without_a_gpus_device_file_the_choice_of_a_device_does_not_import_torch():
    code = "import sys, models; print(models.choose_engine('auto').device, 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True).stdout
    assert printed == "cpu False\n" or any(Path("/dev").glob("nvidia*"))


@pytest.mark.skipif(any(Path("/dev").glob("neuron*")), reason="this machine has a Neuron device")
def test_with_the_neuron_library_and_no_device_the_cpu_is_no_substitute(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE / "bench" / "simulated"))
    assert "no Neuron device: pass it to the container with --device=/dev/neuron0" in refusal(device="auto")


def test_a_cpu_without_openvino_as_in_the_image_for_neuron_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "openvino" else object())
    said = refusal(device="cpu")
    assert said.startswith("--device cpu (DEVICE) needs the package openvino") and said.endswith("the image for CPUs has it")


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("forward", [[]]), ("copy_prefix", [0, 1, 2]), ("set_sampling", [0, 1, 1.0, 1.0]), ("return_token_ids", [True])],
)
def test_a_call_that_an_engine_does_not_implement_fails(method, arguments):
    with pytest.raises(NotImplementedError):
        getattr(StaticBatchModel(), method)(*arguments)
