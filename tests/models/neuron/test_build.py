"""What is decided, compiled, kept and loaded for Neuron: sizes, refusals, compiled folders, the cache, and a device that
fails."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import threading
import weakref
from pathlib import Path

import pytest
from on_neuron import (  # noqa: F401
    CHUNK,
    FAMILIES,
    LLAMA,
    WINDOW,
    Batch,
    assert_serves_whole,
    assert_text_alone,
    built,
    checkpoint,
    compiled,
    decide,
    device,
    fail,
    first_token,
    load,
    load_chunks,
    machine,
    neuron_build,
    neuronxcc,
    refusal,
    serve,
)
from published.configs import OTHERS

from models.cache import evict, locked
from models.errors import ModelError
from models.machine import Machine
from models.neuron.artifact import buckets
from models.neuron.build import explain
from run import ConfigError

INF2_XLARGE = Machine(2, "inf2", "inf2.xlarge", 16 << 30)
OUT_OF_MEMORY = RuntimeError('nrt_tensor_allocate status=4 message="Allocation Failure"')
NO_DEVICE = RuntimeError("The PyTorch Neuron Runtime could not be initialized: NRT:nrt_init Failed to initialize devices")
HELD = RuntimeError("NRT:nrt_allocate_neuron_cores NeuronCore(s) not available - Requested:nc0-nc1 Available:0")
FLAGS = "NEURON_CC_FLAGS"
REFUSED = RuntimeError("neuronx-cc failed with exit code 70")


# What is decided


@pytest.mark.parametrize(
    ("given", "limit", "expected"),
    [
        (None, 128, [128]),
        (None, 129, [128, 129]),
        (None, 2047, [128, 256, 512, 1024, 2047]),
        ((64, 512), 2048, [64, 512, 2048]),
        ((2048,), 2048, [2048]),
    ],
)
def test_buckets_reach_up_to_the_limit(given, limit, expected):
    assert buckets(limit, given, "--prefill-buckets") == tuple(expected)


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_the_rotary_base_reaches_the_library_in_both_forms_of_the_config(tmp_path, version, theta):
    config = LLAMA | {"rope_theta": theta}
    if version == 5:
        del config["rope_theta"], config["torch_dtype"]
        config |= {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}, "dtype": "bfloat16"}
    assert load(tmp_path, config).dtype == "bfloat16"
    (written,) = tmp_path.glob("*/checkpoint/config.json")
    assert json.loads(written.read_text())["rope_theta"] == theta


def test_a_library_that_reads_another_rotary_base_is_refused(tmp_path, monkeypatch):
    make = device.LlamaForSampling.from_pretrained

    def with_the_default(*arguments, **options):
        model = make(*arguments, **options)
        model.config.rope_theta = 10000.0
        return model

    monkeypatch.setattr(device.LlamaForSampling, "from_pretrained", with_the_default)
    reason = refusal(tmp_path, LLAMA | {"rope_theta": 5e5})
    assert reason == "transformers-neuronx reads rope_theta 10000.0 where config.json has 500000.0; it needs transformers 4"


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 5}


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        ({"model_type": "falcon"}, {}, "model_type 'falcon' is not supported on Neuron; these are: llama, code_llama, mistral"),
        ({"model_type": "gpt2"}, {}, "gpt2 models are no longer supported on Neuron"),
        ({"mlp_bias": True}, {}, "mlp_bias is True and this server supports False for llama models on Neuron"),
        (
            EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 3, "swiglu_limit": 5.0},
            {},
            "config.json: swiglu_limit is 5.0 and this server supports 7.0 for gpt_oss models on Neuron",
        ),
        (
            EXPERTS | {"decoder_sparse_step": 2},
            {},
            "config.json: decoder_sparse_step is 2 and this server supports 1 for qwen3_moe models on Neuron",
        ),
        (
            EXPERTS | {"mlp_only_layers": [0]},
            {},
            "config.json: mlp_only_layers is [0] and this server supports [] for qwen3_moe models on Neuron",
        ),
        (EXPERTS | {"num_experts": 0}, {}, "config.json: num_experts is 0 and should be a positive whole number"),
        (
            EXPERTS | {"num_experts_per_tok": 4},
            {},
            "config.json: num_experts_per_tok is 4 and there are 3 experts",
        ),
        (
            EXPERTS,
            {"tp_degree": 2},
            "tp_degree 2 cuts each of 3 experts into 2 pieces, which does not divide its 5 columns; 1 would work",
        ),
        (
            {"num_key_value_heads": 1},
            {"neuron_config": ("shard_over_sequence=true",), "tp_degree": 2, "kv_cache_dtype": "fp8_e4m3fn"},
            "--neuron-config shard_over_sequence=true (NEURON_CONFIG) is not supported with --kv-cache-dtype fp8_e4m3fn",
        ),
        (
            {"model_type": "olmoe", "clip_qkv": 8.0},
            {},
            "config.json: clip_qkv is 8.0 and this server supports None for olmoe models on Neuron",
        ),
        (
            {"model_type": "qwen3"},
            {"neuron_config": ("shard_over_sequence=true",)},
            "--neuron-config shard_over_sequence=true (NEURON_CONFIG) is not supported for qwen3 models on Neuron",
        ),
        (
            {"model_type": "olmo2", "num_attention_heads": 4, "num_key_value_heads": 1},
            {"tp_degree": 2},
            "tp_degree 2 does not divide 4 attention and 1 key-value heads, over all of which a norm goes; 1 would work",
        ),
        ({}, {"quantize": "int4"}, "--quantize int4 (QUANTIZE) is not supported on Neuron; give int8 or none"),
        ({}, {"prefill_buckets": (64,)}, "--prefill-buckets 64 is more than the limit of 24 tokens"),
        ({}, {"position_buckets": (64,)}, "--position-buckets 64 is more than the limit of 24 tokens"),
        (
            {"num_key_value_heads": 2},
            {"neuron_config": ("shard_over_sequence=true",), "tp_degree": 2},
            "needs more heads than its 2 key-value heads, and a tp_degree of two or more times 2; not 4 and 2",
        ),
        (
            {"num_key_value_heads": 1},
            {"neuron_config": ("shard_over_sequence=true",), "tp_degree": 2, "position_buckets": (8, 16)},
            "--neuron-config shard_over_sequence=true (NEURON_CONFIG) works with one position bucket, "
            "not 8, 16, 24; leave --position-buckets (POSITION_BUCKETS) out",
        ),
        ({"rope_parameters": "x"}, {}, "config.json: rope_parameters is 'x' and should be an object"),
        ({"rope_scaling": ["x"]}, {}, "config.json: rope_scaling is ['x'] and should be an object"),
        ({"model_type": "qwen2_vl", "text_config": LLAMA}, {}, "model_type 'qwen2_vl' is not supported on Neuron"),
        ({}, {"tp_degree": 4}, "--tp-degree 4 (TP_DEGREE) needs more cores than the 2 that this process may use"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path, config, settings, reason):
    assert reason in refusal(tmp_path, LLAMA | config, **settings)


def test_sizes_that_are_left_open_are_chosen_for_the_machine(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(neuron_build, "detect", lambda: INF2_XLARGE)
    model = load(tmp_path, LLAMA | {"max_position_embeddings": 512}, max_total_tokens=None, max_input_tokens=None)
    assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (32, 512, 511)
    assert model.prefill_chunk == 128
    assert "On inf2.xlarge with 2 cores: tp_degree 2, batch size 32, context length 512: weights" in caplog.text


def test_a_model_that_does_not_fit_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(neuron_build, "detect", lambda: INF2_XLARGE)
    large = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(LLAMA | large | {"num_key_value_heads": 8}))
    with pytest.raises(ConfigError, match=r"does not fit on 2 cores: .* GiB.*--tp-degree 12 would fit"):
        serve(tmp_path / "large")


@pytest.mark.parametrize(("window", "largest"), [(4096, 4096), (1000, 1000)])
def test_the_largest_prompt_bucket_is_the_window_and_the_longest_prompt_one_token_less(tmp_path, window, largest):
    """The library's kernel for long prompts begins at a bucket of 4096."""
    build = decide(checkpoint(tmp_path / "model", LLAMA | {"max_position_embeddings": window}))
    assert max(build.compiled_config.prefill_buckets) == max(build.compiled_config.position_buckets) == largest
    assert build.config.max_input_tokens == window - 1


def test_no_more_graphs_are_compiled_at_a_time_than_the_process_may_use_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(neuron_build, "host_memory", lambda: 1 << 40)
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {7})
    assert decide(checkpoint(tmp_path / "model")).config.compile_workers == 1


# Cores and the device


def test_the_runtime_takes_no_more_cores_than_the_model_needs(tmp_path, monkeypatch):
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    load(tmp_path, tp_degree=1)
    assert os.environ["NEURON_RT_NUM_CORES"] == "1"


@pytest.mark.parametrize(("visible", "cores"), [("0", 1), ("1", 1), ("0-1", 2), ("0,1", 2)])
def test_the_visible_cores_are_counted_and_left_as_they_are(tmp_path, monkeypatch, visible, cores):
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", visible)
    load(tmp_path)
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == visible
    assert "NEURON_RT_NUM_CORES" not in os.environ
    if cores == 1:
        assert "needs more cores than the 1 that this process may use" in refusal(tmp_path, tp_degree=2)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NO_DEVICE, "no Neuron device can be used here"),
        (OUT_OF_MEMORY, "the device has too little memory"),
        (RuntimeError("A process in the process pool was terminated abruptly"), "the compiler ran out of host memory"),
    ],
)
def test_a_failure_of_the_device_at_boot_is_explained_in_one_line(tmp_path, monkeypatch, error, reason):
    fail(monkeypatch, "to_neuron", error)
    assert reason in refusal(tmp_path)


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, NO_DEVICE])
def test_a_device_that_fails_costs_no_kept_programs(tmp_path, monkeypatch, error):
    load(tmp_path)
    kept = sorted((tmp_path / "cache").rglob("*.neff"))
    fail(monkeypatch, "to_neuron", error)
    refusal(tmp_path)
    assert kept and sorted((tmp_path / "cache").rglob("*.neff")) == kept


def test_without_the_library_the_boot_names_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers_neuronx", None)
    assert "--device neuron needs transformers-neuronx" in refusal(tmp_path)


def test_known_errors_of_the_runtime_are_explained():
    assert explain(OUT_OF_MEMORY).startswith("the device has too little memory for this model")
    assert explain(ValueError("something new\nand more")) == "ValueError: something new"
    assert explain(StopIteration()) == "StopIteration"


def test_the_model_waits_for_cores_that_another_process_holds(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(neuron_build, "CORES_WAIT_S", 60.0)
    holders = ["another process"]
    fail(monkeypatch, "to_neuron", HELD, lambda model: holders)
    monkeypatch.setattr(neuron_build.time, "sleep", lambda seconds: holders.clear())  # it ends meanwhile
    batch = Batch(load(tmp_path))
    batch.join(0, [5, 6])
    assert_text_alone(batch, 0, [5, 6])
    assert caplog.text.count("The NeuronCores are held by another process; trying again") == 1


def test_a_process_that_keeps_the_cores_ends_the_boot_with_what_helps(tmp_path, monkeypatch):
    fail(monkeypatch, "to_neuron", HELD)
    message = refusal(tmp_path)
    assert "the cores are held by another process, also after" in message and "NEURON_RT_VISIBLE_CORES" in message


# Compiled folders


@pytest.mark.parametrize("limits", [{}, {"max_batch_size": 2, "max_total_tokens": 20, "max_input_tokens": 10}])
def test_a_compiled_model_is_served_without_compiling_with_its_limits_or_smaller_ones(tmp_path, limits):
    output = compiled(tmp_path, "--max-batch-size", "4", "--max-input-tokens", "5", "--position-buckets", "8,16")
    model = serve(output, **limits)
    assert not device.compiled
    expected = limits or {"max_batch_size": 4, "max_total_tokens": WINDOW, "max_input_tokens": WINDOW - 1}
    assert [model.batch_size, model.max_total_tokens, model.max_input_tokens] == list(expected.values())
    batch = Batch(model)
    batch.join(0, list(range(1, 11)))
    batch.join(1, [7])
    for _ in range(5):
        batch.step()
    assert_text_alone(batch, 0, list(range(1, 11)))
    assert_text_alone(batch, 1, [7])


@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_folder_with_draft_tokens_is_served_with_slots_that_are_too_short_for_them(tmp_path, length):
    output = compiled(tmp_path, "--speculate", "3", "--max-batch-size", "2")
    batch = Batch(serve(output, max_total_tokens=length))
    batch.join(1, [5])
    for _ in range(length - 2):
        batch.step()
    assert_text_alone(batch, 1, [5])


def test_less_memory_for_snapshots_than_a_folder_was_compiled_for_is_refused(tmp_path):
    config = OTHERS["LiquidAI/LFM2-1.2B"]
    folder = checkpoint(tmp_path / "model", config)
    section = dataclasses.asdict(decide(folder, max_snapshot_memory=0.01).compiled_config)
    (folder / "config.json").write_text(json.dumps(config | {"neuron": section}))
    for memory in (0.01, 1.0, 2.0):
        assert decide(folder, max_snapshot_memory=memory).compiled_config.snapshots == section["snapshots"]
    for memory in (0.005, 0):
        with pytest.raises(
            ConfigError, match=rf"--max-snapshot-memory {memory} .* the 0\.00\d+ GB that .* was compiled for; leave it out"
        ):
            decide(folder, max_snapshot_memory=memory)


def test_a_compiled_model_needs_the_cores_that_it_was_compiled_for(tmp_path, monkeypatch):
    output = compiled(tmp_path)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    with pytest.raises(ConfigError, match=r"--tp-degree 2 .* needs more cores than the 1 that this process may use"):
        serve(output)


@pytest.mark.parametrize(
    ("damage", "reason"), [(Path.unlink, "is missing"), (lambda path: path.write_text(""), "is damaged: it has 0 bytes")]
)
def test_a_missing_or_damaged_program_is_named_in_one_line(tmp_path, damage, reason):
    output = compiled(tmp_path)
    program = next((output / "compiled").glob("*.neff"))
    damage(program)
    with pytest.raises(ModelError, match=f"^{program} {reason}.*; copy {output} again, or compile the model again$"):
        serve(output)


def test_programs_of_a_newer_compiler_are_refused_with_both_versions(tmp_path, monkeypatch):
    output = compiled(tmp_path)
    monkeypatch.setattr(neuronxcc, "__version__", "1.16.372.0")
    with pytest.raises(ConfigError, match=r"compiled by neuronx-cc 2\.0.*, newer than the installed 1\.16\.372\.0"):
        serve(output)


def test_int8_comes_from_the_manifest(tmp_path, built):  # noqa: F811
    serve(compiled(tmp_path, "--quantize", "int8"))
    assert built[-1].quant.quant_dtype == "s8"


OPTIONS = ("collectives_layout=BSH", "on_device_embedding=true", "sequence_parallel_norm_threshold=512")


def test_options_of_the_library_reach_it_and_come_from_the_manifest(tmp_path, built):  # noqa: F811
    output = compiled(tmp_path, "--neuron-config", ",".join(OPTIONS))
    serve(output)
    serve(output, neuron_config=OPTIONS[:1])
    assert not device.compiled
    for config in built:
        assert (config.collectives_layout, config.on_device_embedding) == ("BSH", True)
        assert config.sequence_parallel_norm_threshold == 512 and not hasattr(config, "sequence_parallel_norm")
    assert len(built) == 3
    with pytest.raises(ConfigError, match=r"--neuron-config shard_over_sequence=true \(NEURON_CONFIG\) contradicts"):
        serve(output, neuron_config=("shard_over_sequence=true",))


def test_a_cache_that_is_sharded_by_positions_has_one_position_bucket_and_a_folder_with_several_is_refused(tmp_path):
    options = ("--neuron-config", "shard_over_sequence=true", "--prefill-buckets", "8", "--sampling", "host")
    output = compiled(tmp_path, *options, config=LLAMA | {"num_key_value_heads": 1})
    manifest = json.loads((output / "config.json").read_text())
    assert (manifest["neuron"]["position_buckets"], manifest["neuron"]["prefill_buckets"]) == ([WINDOW], [8, WINDOW])
    serve(output)
    manifest["neuron"]["position_buckets"] = [16, WINDOW]  # as an older version compiled it
    (output / "config.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"one position bucket, not 16, 24; .* compile a compiled model again$"):
        serve(output)


def test_sampling_on_the_device_comes_from_the_manifest(tmp_path):
    output = compiled(tmp_path, "--sampling", "device", "--max-batch-size", "4")
    model = serve(output, max_batch_size=2)
    assert model.sampling == "device" and not device.compiled
    model.set_sampling(1, 1, 1.0, 1.0)
    batch = Batch(model)
    batch.join(1, [5, 6])
    assert_text_alone(batch, 1, [5, 6])
    with pytest.raises(ConfigError, match=r"--sampling host \(SAMPLING\) contradicts"):
        serve(output, sampling="host")


def test_a_folder_is_served_with_the_chunks_that_it_was_compiled_for(tmp_path):
    output = compiled(tmp_path, "--prefill-chunk", str(CHUNK), "--max-batch-size", "2")
    assert serve(output).prefill_chunk == CHUNK
    assert serve(output, prefill_chunk=CHUNK).prefill_chunk == CHUNK
    assert serve(output, prefill_chunk=0).prefill_chunk is None
    assert serve(output, max_input_tokens=CHUNK).prefill_chunk is None  # all prompts are that short
    assert not device.compiled
    with pytest.raises(ConfigError, match=r"--prefill-chunk 8 \(PREFILL_CHUNK\) contradicts .* compiled for 4; leave it out"):
        serve(output, prefill_chunk=8)


def test_a_folder_that_was_compiled_for_another_class_is_refused(tmp_path):
    output = compiled(tmp_path)
    (output / "config.json").write_text((output / "config.json").read_text().replace("LlamaForSampling", "OtherForSampling"))
    with pytest.raises(ModelError, match="compiled for OtherForSampling, not LlamaForSampling; compile it again"):
        serve(output)


def optimum(tmp_path, config=LLAMA, **section):
    """A folder as optimum-neuron writes it."""
    section = {
        "task": "text-generation",
        "batch_size": 4,
        "num_cores": 2,
        "auto_cast_type": "bf16",
        "sequence_length": WINDOW,
        "compiler_type": "neuronx-cc",
        "compiler_version": "2.16.372.0",
        "checkpoint_id": None,
    } | section
    folder = tmp_path / "optimum"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"neuron": section}))
    checkpoint(folder / "checkpoint", config)
    return folder


def test_a_mixtral_that_was_compiled_for_the_librarys_own_class_is_compiled_again(tmp_path):
    output = compiled(tmp_path, config=FAMILIES["mixtral"])
    config = json.loads((output / "config.json").read_text())
    config["neuron"]["model_class"] = "MixtralForSampling"
    (output / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as refused:
        serve(output)
    assert str(refused.value).endswith("compiled for MixtralForSampling, not mixtral, revision 2; compile it again")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_folder_of_optimum_neuron_is_compiled_with_its_values_once(tmp_path, caplog, family):
    caplog.set_level("INFO")
    folder = optimum(tmp_path, FAMILIES[family])
    for compiles in (True, False):
        device.compiled.clear()
        model = serve(folder)
        assert bool(device.compiled) == compiles
        assert (model.batch_size, model.max_total_tokens, model.max_input_tokens) == (4, WINDOW, WINDOW - 1)
    assert caplog.text.count("The compiled graphs of optimum-neuron cannot be loaded") == 2


def test_a_folder_without_weights_names_what_it_lacks(tmp_path):
    folder = optimum(tmp_path)
    (folder / "checkpoint").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="has no folder `checkpoint` and names no checkpoint_id"):
        serve(folder)


def test_weights_are_downloaded_by_the_id_and_the_commit_in_the_manifest(tmp_path, monkeypatch):
    folder = optimum(tmp_path, checkpoint_id="someone/llama", checkpoint_revision="abc")
    elsewhere = (folder / "checkpoint").rename(tmp_path / "elsewhere")
    requested = []
    monkeypatch.setattr(neuron_build, "fetch_checkpoint", lambda config, *named: requested.append(named) or elsewhere)
    assert serve(folder).batch_size == 4
    assert requested == [("someone/llama", "abc")]


# The cache of `serve`


def test_a_plain_checkpoint_is_compiled_once(tmp_path, caplog):
    caplog.set_level("INFO")
    phases = []
    load(tmp_path, max_batch_size=2, announce=phases.append)
    programs = len(device.compiled)
    assert programs and phases == ["compiling"]
    assert "has no compiled graphs for" in caplog.text and "Compiling graphs for prompts up to 24" in caplog.text
    load(tmp_path, max_batch_size=2, announce=phases.append)
    assert len(device.compiled) == programs and phases == ["compiling"]
    load(tmp_path, max_batch_size=3)
    assert len(device.compiled) == 2 * programs


def test_programs_with_other_options_or_chunks_are_compiled_anew_and_kept_beside(tmp_path, caplog):
    caplog.set_level("INFO")
    for settings in ({}, {"neuron_config": OPTIONS}, {"prefill_chunk": 6}) * 2:
        load_chunks(tmp_path, **settings)
    assert caplog.text.count("has no compiled graphs for") == 3


def test_another_limit_of_prompts_compiles_nothing(tmp_path):
    for limit in (WINDOW - 1, 5, 9):
        device.compiled.clear()
        assert load(tmp_path, max_batch_size=2, max_input_tokens=limit).max_input_tokens == limit
        assert bool(device.compiled) == (limit == WINDOW - 1)


def test_a_model_whose_programs_cannot_be_kept_is_served(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "file"))
    assert load(tmp_path).batch_size
    assert "cannot be kept, so each startup compiles them again" in caplog.text


def test_a_damaged_program_that_was_kept_is_named_and_compiled_again(tmp_path, caplog):
    load(tmp_path)
    (record,) = (tmp_path / "cache" / "neuron-textgen").glob("*/programs.json")
    program = next(record.parent.glob("*.neff"))
    program.write_text("")
    for compiles in (True, False):
        device.compiled.clear()
        load(tmp_path)
        assert bool(device.compiled) == compiles
    assert caplog.text.count(f"{program} is damaged: it has 0 bytes") == 1


def test_kept_programs_that_lack_one_are_named_and_compiled_again(tmp_path, caplog):
    load(tmp_path)
    (record,) = (tmp_path / "cache" / "neuron-textgen").glob("*/programs.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"files": {}}))  # as of a version that compiles others
    next(record.parent.glob("*.neff")).unlink()
    for compiles in (True, False):
        device.compiled.clear()
        load(tmp_path)
        assert bool(device.compiled) == compiles
    assert caplog.text.count("a compiled graph of this model is missing") == 1


def test_of_two_servers_that_need_the_same_programs_one_compiles_them(tmp_path, monkeypatch):
    waits, loaded = threading.Event(), []
    folder = tmp_path / "cache" / "neuron-textgen"
    load(tmp_path)
    (entry,) = (path.parent for path in folder.glob("*/programs.json"))
    entry.rename(tmp_path / "made")
    device.compiled.clear()
    monkeypatch.setattr("models.cache.logger.info", lambda message, *_: waits.set() if "waiting for it" in message else None)
    with locked(entry.with_suffix(".lock"), "compiling"):
        other = threading.Thread(target=lambda: loaded.append(load(tmp_path)))
        other.start()
        assert waits.wait(60)
        (tmp_path / "made").rename(entry)
    other.join(60)
    assert loaded and not device.compiled


def test_programs_are_not_removed_while_a_server_loads_them(tmp_path, monkeypatch):
    load(tmp_path, max_batch_size=2)
    device.compiled.clear()
    verify_checksums, calls = neuron_build.artifact.verify_checksums, []

    def another_server_fills_the_cache(entry, files):
        if not calls:
            calls.append(entry)
            newest = entry.with_name("newest")
            newest.mkdir()
            (newest / "programs.json").touch()
            os.utime(newest / "programs.json", (1e10, 1e10))
            evict([newest / "programs.json", entry / "programs.json"], 0.0, "--compile-cache-size")
        return verify_checksums(entry, files)

    monkeypatch.setattr(neuron_build.artifact, "verify_checksums", another_server_fills_the_cache)
    load(tmp_path, max_batch_size=2)
    assert calls and not device.compiled
    evict([calls[0].with_name("newest") / "programs.json", calls[0] / "programs.json"], 0.0, "--compile-cache-size")
    assert not calls[0].exists()  # once nothing uses it


def test_a_cache_that_another_user_may_write_to_is_refused(tmp_path):
    load(tmp_path)
    (tmp_path / "cache" / "neuron-textgen").chmod(0o777)
    assert "neuron-textgen (NEURON_COMPILE_CACHE_URL) can be written to by other users; chmod 700 it" in refusal(tmp_path)


@pytest.mark.parametrize("size_gb", [1.0, 1e-9])
def test_the_cache_of_programs_is_bounded(tmp_path, size_gb):
    for slots in (2, 3, 4):
        load(tmp_path, max_batch_size=slots, compile_cache_size=size_gb)
    assert len(list((tmp_path / "cache" / "neuron-textgen").glob("*/programs.json"))) == (3 if size_gb == 1.0 else 1)


# A KV cache in FP8

TENSORIZER, FP8 = "--internal-hlo2tensorizer-options", "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"


def test_compiler_flags_with_an_open_quote_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"^NEURON_CC_FLAGS .*: No closing quotation"):
        neuron_build.flags_for_fp8("--x='a b")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", [f"{TENSORIZER}={FP8}"]),
        ("-O1 --auto-cast=none", ["-O1", "--auto-cast=none", f"{TENSORIZER}={FP8}"]),
        (f"{TENSORIZER}='--verify-hlo=true --x=2' -O1", ["-O1", f"{TENSORIZER}=--verify-hlo=true --x=2 {FP8}"]),
        (f"{TENSORIZER} --a=1 -O1", ["-O1", f"{TENSORIZER}=--a=1 {FP8}"]),
        (f"{TENSORIZER}={FP8}", [f"{TENSORIZER}={FP8}"]),
    ],
)
def test_the_option_for_fp8_joins_the_flags_that_are_given(given, expected):
    flags = neuron_build.flags_for_fp8(given)
    assert shlex.split(flags) == expected
    assert neuron_build.flags_for_fp8(flags) == flags


@pytest.mark.parametrize("flags", [None, "-O1"])
@pytest.mark.parametrize("sampling", ["host", "hybrid"])
def test_the_compiler_has_the_option_for_fp8_only_while_it_compiles_for_it(tmp_path, monkeypatch, built, flags, sampling):  # noqa: F811
    real = device.LlamaForSampling.to_neuron
    seen = []
    monkeypatch.setattr(device.LlamaForSampling, "to_neuron", lambda model: seen.append(os.environ.get(FLAGS)) or real(model))
    if flags:
        monkeypatch.setenv(FLAGS, flags)
    model = load_chunks(tmp_path, kv_cache_dtype="fp8_e4m3fn", sampling=sampling)
    assert (model.kv_cache_dtype, model.dtype, model.prefill_chunk) == ("fp8_e4m3fn", "bfloat16", CHUNK)
    assert (built[-1].kv_cache_quant.quant_dtype, built[-1].kv_cache_quant.dequant_dtype) == ("f8e4m3fn", "bf16")
    load_chunks(tmp_path, kv_cache_dtype="fp8_e4m3fn", sampling=sampling)  # of the cache
    assert seen == [neuron_build.flags_for_fp8(flags or ""), flags] and os.environ.get(FLAGS) == flags
    assert load_chunks(tmp_path, sampling=sampling).kv_cache_dtype == "bfloat16" and seen[-1] == flags
    assert not hasattr(built[-1], "kv_cache_quant")


def test_a_compiler_without_fp8_is_said_so_and_not_tried_without_other_parts(tmp_path, monkeypatch, built):  # noqa: F811
    fail(monkeypatch, "to_neuron", RuntimeError("NCC_EVRF051 Data type F8E4M3FN is not supported on TRN1"))
    with pytest.raises(ModelError, match=r"does not support a KV cache in FP8; leave out --kv-cache-dtype \(KV_CACHE_DTYPE\)"):
        load_chunks(tmp_path, kv_cache_dtype="fp8_e4m3fn", speculate=3)
    assert len(built) == 1


def test_the_kv_cache_of_a_compiled_folder_is_fixed(tmp_path):
    output = compiled(tmp_path, "--kv-cache-dtype", "fp8")
    assert serve(output).kv_cache_dtype == serve(output, kv_cache_dtype="fp8_e4m3fn").kv_cache_dtype == "fp8_e4m3fn"
    assert json.loads((output / "config.json").read_text())["neuron"]["kv_cache_dtype"] == "fp8_e4m3fn"


# A compiler that fails on the graph of chunks


@pytest.fixture
def refuses_chunks(monkeypatch):
    fail(monkeypatch, "_add_chunks", REFUSED)


def test_chunks_that_no_prompt_is_longer_than_are_not_compiled(tmp_path, refuses_chunks, caplog):
    for given in ({}, {"prefill_chunk": WINDOW - 1}, {"prefill_chunk": 0}):
        assert load(tmp_path, max_input_tokens=WINDOW - 1, **given).prefill_chunk is None
    assert "Chunked prefill is off" not in caplog.text


def test_a_compiler_that_refuses_the_program_turns_chunks_off_with_one_warning_at_each_start(tmp_path, refuses_chunks, caplog):
    assert_serves_whole(load_chunks(tmp_path), caplog)
    assert "neuronx-cc failed with exit code 70" in caplog.text
    device.compiled.clear()
    caplog.clear()
    assert_serves_whole(load_chunks(tmp_path), caplog)
    assert not device.compiled and "compiling for it has failed; remove " in caplog.text


def test_a_folder_is_compiled_without_the_program_that_the_compiler_refuses(tmp_path, refuses_chunks, caplog):
    output = compiled(tmp_path, "--prefill-chunk", str(CHUNK), "--max-batch-size", "2")
    assert decide(output).compiled_config.prefill_chunk == 0
    assert_serves_whole(serve(output), caplog)


@pytest.fixture
def refuses_both(monkeypatch):
    """A compiler that fails on graphs with ids and logits."""

    def is_hybrid(model):
        return model._gives_both

    fail(monkeypatch, "to_neuron", REFUSED, when=is_hybrid)
    fail(monkeypatch, "cpu_compile", REFUSED, when=is_hybrid)


def test_a_compiler_that_refuses_hybrid_sampling_leaves_it_to_the_host_with_one_warning(tmp_path, refuses_both, caplog):
    for reason in ("as compiling for it failed: ", "as compiling for it has failed; remove "):
        model = load_chunks(tmp_path)
        assert (model.sampling, model.prefill_chunk) == ("host", CHUNK)
        assert caplog.text.count("On-device sampling is off (--sampling), " + reason) == 1
        assert "Chunked prefill is off" not in caplog.text
        caplog.clear()
        device.compiled.clear()
    output = compiled(tmp_path)
    assert decide(output).compiled_config.sampling == serve(output).sampling == "host"


def test_a_model_that_did_not_compile_is_gone_before_the_next_try_takes_its_place_on_the_device(tmp_path, monkeypatch):
    made, alive = [], []
    make, to_neuron = neuron_build.make, device.LlamaForSampling.to_neuron

    def listen(build, work_dir):
        alive.append(sum(model() is not None for model in made))
        model = make(build, work_dir)
        made.append(weakref.ref(model))
        return model

    def refuse(model):
        if model._gives_both:
            raise RuntimeError("neuronx-cc failed with exit code 70")
        to_neuron(model)

    monkeypatch.setattr(neuron_build, "make", listen)
    monkeypatch.setattr(device.LlamaForSampling, "to_neuron", refuse)
    assert load_chunks(tmp_path, speculate=3).sampling == "host"
    assert alive == [0, 0, 0, 0]


def test_hybrid_sampling_that_was_asked_for_is_not_replaced(tmp_path, refuses_both):
    with pytest.raises(ModelError, match="neuronx-cc failed with exit code 70"):
        load(tmp_path, sampling="hybrid")


def test_a_device_that_fails_is_no_reason_to_compile_again(tmp_path, monkeypatch, caplog):
    fail(monkeypatch, "to_neuron", OUT_OF_MEMORY)
    with pytest.raises(ModelError, match="too little memory"):
        load_chunks(tmp_path)
    assert "Chunked prefill is off" not in caplog.text


def test_the_device_cannot_look_embeddings_up_for_a_model_that_reads_images(tmp_path):
    folder = checkpoint(tmp_path / "model", {"model_type": "llava", "text_config": LLAMA, "vision_config": {}})
    settings = {"tp_degree": 2, "max_total_tokens": WINDOW, "neuron_config": ("on_device_embedding=true",)}
    assert decide(folder, **settings).family.is_nested  # of text alone, without files about images
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    with pytest.raises(
        ConfigError, match=r"on_device_embedding=true \(NEURON_CONFIG\) is not supported for models that read images"
    ):
        decide(folder, **settings)
