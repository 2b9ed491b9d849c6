"""LoRA adapters that requests choose: on every engine the logits are those of peft, and depend on a row's own adapter alone."""

import functools
import random
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
import tiny_models
import torch
import transformers
import vision_models
from adapter_schedules import check_schedule, vocabulary
from published.weights import CACHE, Published
from safetensors.torch import load_file
from tiny_models import POSITIONS, VOCABULARY, made_checkpoint, run, save_checkpoint, settings, write_adapter
from transformers import AutoModelForCausalLM
from wrong_adapters import wrong_adapters

import models
from models.accuracy import kl_divergence
from models.adapters import Adapters, read_updates
from models.base import Chunk
from models.checkpoint import source
from models.checkpoint.pretrained import load_pretrained, reference_logits
from models.child import shortened
from models.errors import ModelError
from models.pytorch.model import TorchModel
from run import ConfigError

pytestmark = [
    pytest.mark.models,
    pytest.mark.usefixtures("conversions", "no_children"),
    pytest.mark.filterwarnings("ignore"),
]

SCHEDULES = hypothesis.settings.default.max_examples // 5  # each runs up to twelve requests twice
ALL = "all-linear"
QV = {
    "llama": ["q_proj", "v_proj"],
    "qwen2": ["q_proj", "v_proj"],
    "phi3": ["qkv_proj"],
}
ADAPTERS = {
    "narrow": {"r": 1, "target_modules": None},  # None: those of QV
    "seven": {"r": 7, "target_modules": ALL},
    "scaled": {"r": 20, "target_modules": ALL, "use_rslora": True},
    "wide": {"r": 64, "target_modules": ALL, "rank_pattern": {"o_proj": 5}},
}
IDS = np.random.default_rng(0).integers(0, VOCABULARY, 20).tolist()
PROMPT, NEW_TOKENS = IDS[:12], 8


def save_adapter(base, folder, seed=1, scale=0.2, **given):
    """A random adapter, as peft saves it; returns peft's model."""
    import peft  # takes seconds

    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**{"lora_alpha": 8} | given))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and parameter.dim() == 2:
                spread = scale if "lora_B" in name else parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    model.save_pretrained(folder)
    return model.eval()


def logits_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


def continuation_of(model, ids):
    """The greedy one, of NEW_TOKENS."""
    given = torch.tensor([ids])
    with torch.inference_mode():
        out = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(ids) :].tolist()


class Adapted:
    """A base model, adapters of it, and the logits and the texts that peft computes with them."""

    def __init__(self, folder, family, config=None, spread=0.3, **save):
        change = {"change": give_biases} if family == "qwen2" else {}
        self.base = made_checkpoint(config or tiny_models.ALL[family](), spread=spread, **change)
        self.folder = folder
        self.expected = {}
        self.continued = {}
        for seed, (name, given) in enumerate(ADAPTERS.items()):
            given = given | {"target_modules": given["target_modules"] or QV[family]}
            model = save_adapter(self.base, folder / name, seed, **given, **save)
            self.expected[name] = logits_of(model, IDS)
            self.continued[name] = continuation_of(model, PROMPT)

    def serve(self, engine, names=tuple(ADAPTERS), **changes):
        return serve(engine, self.base, names, self.folder, **changes)

    @property
    def updates(self):
        """The folder of the updates of each adapter."""
        given = settings(self.base)
        return {name: source.read_adapter(given, name, str(self.folder / name)) for name in ADAPTERS}


def give_biases(base):
    """Those of a new model are zeros."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.copy_(torch.linspace(-1, 1, len(parameter)))
    model.save_pretrained(base)


def serve(engine, base, names, folder=None, **changes):
    """A model with the adapters of these names in a folder."""
    adapters = tuple(f"{name}={(folder or base.parent) / name}" for name in names)
    changes = {"max_total_tokens": POSITIONS, "max_batch_size": 8, "lora_adapters": adapters} | changes
    prepared = models.prepare(settings(base, **changes))
    if engine == "torch":
        return TorchModel(prepared.config, base, "cpu")
    model = models.load(prepared, lambda phase: None)
    assert model.engine == "openvino"
    return model


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    return functools.cache(lambda family: Adapted(tmp_path_factory.mktemp(family), family))


def chunks_of(model, names, tokens, begin):
    """A chunk of a slot for each adapter; None is none."""
    numbers = [name and model.adapters.numbers[name] for name in names]
    return [Chunk(slot, tokens, begin, adapter=number or 0) for slot, number in enumerate(numbers)]


def rows(model, names, ids=IDS, steps=4):
    """The logits of a prompt and of decode steps in which all rows run together, by name."""
    found = {name: [] for name in names}
    prompts = chunks_of(model, names, ids[:-steps], 0)
    calls = [prompts] if model.supports_chunked_prefill else [[chunk] for chunk in prompts]
    for name, row in zip(names, np.concatenate([model.forward(call) for call in calls])):
        found[name].append(row)
    for step in range(steps):
        position = len(ids) - steps + step
        logits = model.forward(chunks_of(model, names, ids[position : position + 1], position))
        for name, row in zip(names, logits):
            found[name].append(row)
    return {name: np.stack(logits) for name, logits in found.items()}


@pytest.mark.parametrize("engine", ["openvino", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_each_row_has_the_logits_and_the_text_of_pefts_model_and_the_same_bits_in_any_company(adapted, family, engine):
    made = adapted(family)
    model = made.serve(engine)
    names = [None, *ADAPTERS]
    together = rows(model, names)
    for name in ADAPTERS:
        np.testing.assert_allclose(together[name], made.expected[name][-5:], atol=1e-4)
        assert np.abs(together[name] - together[None]).max() > 0.1
        assert np.array_equal(rows(model, [name])[name], together[name])
        (sequence,) = run(model, [PROMPT], new_tokens=NEW_TOKENS, adapters=[model.adapters.numbers[name]])
        assert sequence.tokens == made.continued[name]
    plain = rows(made.serve(engine, names=()), [None])
    assert np.array_equal(plain[None], together[None])
    others = made.serve(engine, names=["wide", "narrow"])
    for name, logits in rows(others, [None, "narrow", "wide"]).items():
        assert np.array_equal(logits, together[name])


@pytest.mark.timeout(600)
def test_adapters_of_a_published_model_give_the_logits_and_the_texts_of_pefts_model(tmp_path):
    published = Published.of("smollm2")
    ids = list(published.ids("Once upon a time there was a small computer that"))
    expected = {}
    for name in ("narrow", "scaled"):
        given = ADAPTERS[name] | {"target_modules": ADAPTERS[name]["target_modules"] or QV["llama"]}
        model = save_adapter(published.folder, tmp_path / name, scale=0.05, **given)
        expected[name] = logits_of(model, ids), continuation_of(model, ids)
    where = {"max_total_tokens": 64, "dtype": "float32", "model_cache": str(CACHE)}
    served = serve("openvino", published.folder, list(expected), tmp_path, **where)
    together = rows(served, [None, *expected], ids)
    for name, (logits, text) in expected.items():
        np.testing.assert_allclose(together[name], logits[-5:], atol=1e-4)
        assert np.array_equal(rows(served, [name], ids)[name], together[name])
        (sequence,) = run(served, [ids], new_tokens=NEW_TOKENS, adapters=[served.adapters.numbers[name]])
        assert sequence.tokens == text != continuation_of(published.model, ids)


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    """Models with sums as long as those of usual ones, whose layers of one input are merged when they are compressed."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 1, "max_position_embeddings": 300}

    @functools.cache
    def make(family):
        config = getattr(tiny_models, family)(**sizes)
        return Adapted(tmp_path_factory.mktemp(family), family, config, spread=0.05, scale=0.05)

    return make


@pytest.mark.parametrize(
    ("family", "engine", "dtype", "quantize"),
    [
        ("llama", "openvino", "float32", None),
        ("llama", "openvino", "bfloat16", None),
        ("llama", "openvino", "bfloat16", "int8"),
        ("qwen2", "openvino", "bfloat16", "int8"),
        ("phi3", "openvino", "bfloat16", "int8"),
        ("llama", "torch", "float32", None),
    ],
)
def test_a_row_has_the_same_bits_wherever_its_adapter_lies(wider, family, engine, dtype, quantize):
    """Among so many that matrix products of all columns are summed in another order."""
    even = wider(family)
    model = even.serve(engine, dtype=dtype, quantize=quantize, threads=1 if engine == "torch" else 2, max_total_tokens=300)
    names = [None, *ADAPTERS]
    together = rows(model, names)
    for name in ADAPTERS:
        assert np.array_equal(rows(model, [name])[name], together[name])
        assert kl_divergence(together[name], even.expected[name][-5:]).mean() < 0.01
    updates = {name: read_updates(even.updates[name]) for name in ADAPTERS}
    for number in range(12):
        model.adapters.add(f"wide {number}", updates["wide"])
        model.adapters.add(f"seven {number}", updates["seven"])
    chance = random.Random(0)
    added = list(model.adapters.numbers)
    for _ in range(3):
        some = chance.sample(added, 5)
        for name, logits in rows(model, [None, *some]).items():
            assert np.array_equal(logits, together[name and name.split()[0]])
    for name in added[:9:4]:
        model.adapters.remove(model.adapters.numbers.pop(name))
    for name, logits in rows(model, [None, *added[2:9:4]]).items():
        assert np.array_equal(logits, together[name and name.split()[0]])


@pytest.fixture(scope="module")
def worded(tmp_path_factory):
    """A model whose tokens are pieces of text, as grammars need them."""
    config = tiny_models.llama(vocab_size=vocabulary()[0], max_position_embeddings=64)
    return Adapted(tmp_path_factory.mktemp("worded"), "llama", config)


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_in_any_schedule_a_request_generates_what_it_generates_alone(worded, engine):
    model = worded.serve(engine, max_total_tokens=64, max_batch_size=4, prefix_slots=6 if engine == "openvino" else None)
    counts = [check_schedule(model, seed, max_batch_prefill_tokens=7) for seed in range(SCHEDULES)]
    accepted, held, finished = np.mean(counts, axis=0)
    assert finished > 5
    assert min(accepted, held) > 5 or engine == "torch"  # which has no drafts, and keeps no prefixes


def test_draft_tokens_of_several_adapters_are_verified_as_in_single_steps(adapted):
    model = adapted("llama").serve("openvino")
    names = ["seven", None, "wide"]
    for chunk in chunks_of(model, names, IDS[:10], 0):
        model.forward([chunk])
    single = [model.forward(chunks_of(model, names, IDS[n : n + 1], n)) for n in (10, 11, 12)]
    drafts = [chunk._replace(verify=True) for chunk in chunks_of(model, names, IDS[10:13], 10)]
    assert np.array_equal(model.forward(drafts).reshape(3, 3, -1), np.stack(single, axis=1))


@pytest.mark.parametrize("family", ["mixtral", "gpt2"])
@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_a_module_that_cannot_have_an_adapter_is_refused_by_name(tmp_path, family, engine):
    base = save_checkpoint(tmp_path / "base", tiny_models.ALL[family]())
    module = {"mixtral": "layers.0.mlp.experts.0.w1", "gpt2": "transformer.h.0.attn.c_attn"}[family]
    write_adapter(tmp_path / "own", {f"model.{module}": (torch.ones(2, 48), torch.ones(144, 2))})
    with pytest.raises(ModelError, match=rf"the LoRA adapter own changes {module}, which is no linear layer") as refused:
        serve(engine, base, ["own"])
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A model that reads images, and an adapter of its text part in each spelling, and of its tower as well."""
    root = tmp_path_factory.mktemp("reader")
    base = vision_models.make("qwen2_5_vl", root / "base", shrink=4)
    generator = torch.Generator().manual_seed(0)
    pairs = {
        f"layers.{layer}.self_attn.{name}": (torch.randn(2, 48, generator=generator), torch.randn(size, 2, generator=generator))
        for layer in range(2)
        for name, size in {"q_proj": 48, "v_proj": 24}.items()
    }
    for name, prefix in {"text": "model.", "old": "language_model.model.", "new": "model.language_model."}.items():
        modules = {prefix + module: pair for module, pair in pairs.items()}
        write_adapter(root / name, modules, alpha_pattern={f"{prefix}layers.1.*": 4})
    tower = {"model.visual.blocks.0.attn.qkv": (torch.randn(2, 32), torch.randn(96, 2))}
    write_adapter(root / "tower", {f"model.{module}": pair for module, pair in pairs.items()} | tower)
    return base


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_modules_of_a_model_that_reads_images_are_found_in_every_spelling(reader, tmp_path, engine):
    names = ["text", "old", "new"]
    found = rows(serve(engine, reader, names), [None, *names])
    assert np.abs(found["text"] - found[None]).max() > 0.1
    assert np.array_equal(found["text"], found["old"]) and np.array_equal(found["text"], found["new"])
    merged = models.prepare(settings(reader, merge_lora=f"a={reader.parent / 'new'}", max_total_tokens=POSITIONS))
    expected = rows(TorchModel(merged.config, merged.folder, "cpu"), [None])
    np.testing.assert_allclose(found["new"], expected[None], atol=1e-3)


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": POSITIONS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# A model, its linear layers beside those of attention and MLPs, and the beginning of its names in another spelling.
RECURRENT = {
    "linear attention": (
        transformers.Qwen3_5TextConfig(
            **SIZES | HEADS,
            num_hidden_layers=4,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
        [f"model.layers.1.linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")],
        "model.language_model.",
    ),
    "short convolutions": (
        transformers.Lfm2Config(**SIZES | HEADS, num_hidden_layers=2, full_attn_idxs=[1], block_auto_adjust_ff_dim=False),
        ["model.layers.0.conv.in_proj", "model.layers.0.conv.out_proj", "model.layers.0.feed_forward.w2"],
        "language_model.model.",
    ),
    "Mamba 2": (
        transformers.NemotronHConfig(
            **SIZES | HEADS,
            head_dim=16,
            hybrid_override_pattern="M*-",
            mamba_num_heads=4,
            mamba_head_dim=32,
            ssm_state_size=16,
            n_groups=2,
        ),
        ["model.layers.0.mixer.in_proj", "model.layers.0.mixer.out_proj", "model.layers.1.mixer.q_proj"],
        "backbone.",  # as the checkpoint has it
    ),
    "Mamba": (
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8),
        [f"backbone.layers.0.mixer.{name}" for name in ("in_proj", "x_proj", "out_proj")],
        "model.",
    ),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_linear_layers_around_recurrences_have_adapters_in_every_spelling(tmp_path, kind):
    config, modules, other = RECURRENT[kind]
    base = made_checkpoint(config)
    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(0)
    pairs = {}
    for name in modules:
        rows_of, columns = model.get_submodule(name).weight.shape
        pairs[name] = torch.randn(2, columns, generator=generator) / 8, torch.randn(rows_of, 2, generator=generator) / 8
    write_adapter(tmp_path / "own", pairs)
    first = modules[0].partition("layers.")[0]
    write_adapter(tmp_path / "other", {name.replace(first, other, 1): pair for name, pair in pairs.items()})
    served = serve("openvino", base, ["own", "other"], tmp_path)
    found = rows(served, [None, "own", "other"])
    for name in ("own", "other"):
        merged = models.prepare(settings(base, merge_lora=f"a={tmp_path / name}", max_total_tokens=POSITIONS))
        expected = reference_logits(load_pretrained(merged.config, merged.folder, "cpu"), IDS)
        np.testing.assert_allclose(found[name], expected[-5:], atol=1e-4 * np.abs(expected).max())
    assert np.abs(found["own"] - found[None]).max() > 0.1


def test_layers_of_one_input_that_were_merged_have_adapters_of_their_own(tmp_path):
    """As int8 merges those of a linear attention."""
    config, modules, _other = RECURRENT["linear attention"]
    base = made_checkpoint(config, spread=0.05)
    model = AutoModelForCausalLM.from_pretrained(base)
    shapes = {name: model.get_submodule(name).weight.shape for name in modules}
    generator = torch.Generator().manual_seed(0)
    pairs = {
        name: (torch.randn(2, columns, generator=generator) / 8, torch.randn(outputs, 2, generator=generator) / 4)
        for name, (outputs, columns) in shapes.items()
    }
    write_adapter(tmp_path / "own", pairs)
    found = rows(serve("openvino", base, ["own"], tmp_path, quantize="int8"), [None, "own"])
    merged = models.prepare(settings(base, merge_lora=f"a={tmp_path / 'own'}", max_total_tokens=POSITIONS))
    expected = reference_logits(load_pretrained(merged.config, merged.folder, "cpu"), IDS)[-5:]
    assert kl_divergence(found["own"], expected).mean() < 0.1 * kl_divergence(found[None], expected).mean()


def test_the_time_steps_of_mamba_are_no_linear_layer_and_refused_by_name(tmp_path):
    base = made_checkpoint(RECURRENT["Mamba"][0])
    write_adapter(tmp_path / "own", {"backbone.layers.0.mixer.dt_proj": (torch.ones(2, 4), torch.ones(128, 2))})
    with pytest.raises(ModelError, match=r"own changes layers\.0\.mixer\.dt_proj, which is no linear layer"):
        serve("openvino", base, ["own"], tmp_path)


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_an_adapter_of_a_tower_is_merged_and_refused_by_request(reader, engine):
    with pytest.raises(ModelError, match=r"tower changes visual\.blocks\.0\.attn\.qkv, which .* merge it with --merge-lora"):
        serve(engine, reader, ["tower"])
    merged = models.prepare(settings(reader, merge_lora=f"a={reader.parent / 'tower'}", max_total_tokens=POSITIONS))
    before, after = (load_file(folder / "model.safetensors") for folder in (reader, merged.folder))
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    text = {f"model.layers.{layer}.self_attn.{name}.weight" for layer in range(2) for name in ("q_proj", "v_proj")}
    assert changed == text | {"visual.blocks.0.attn.qkv.weight"}


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_an_adapter_of_a_model_of_another_size_is_refused(adapted, tmp_path, engine):
    write_adapter(tmp_path / "own", {"model.layers.0.self_attn.q_proj": (torch.ones(2, 64), torch.ones(48, 2))})
    with pytest.raises(ModelError, match=r"q_proj from 64 to 48 numbers, and it has 48 and 48: is this its base model\?"):
        serve(engine, adapted("llama").base, ["own"], tmp_path)


@pytest.mark.parametrize("number", [torch.nan, -torch.inf, 1e30])
def test_weights_that_are_no_numbers_or_huge_are_refused_because_they_would_reach_every_request(adapted, tmp_path, number):
    up = torch.ones(48, 2)
    up[3, 1] = number
    write_adapter(tmp_path / "own", {"model.layers.0.self_attn.q_proj": (torch.ones(2, 48), up)})
    with pytest.raises(ModelError, match=r"reading the LoRA adapter own failed: .*q_proj\.up that are NaN or 1e\+06 and more"):
        serve("torch", adapted("llama").base, ["own"], tmp_path)


def test_an_adapter_without_weights_is_refused(adapted, tmp_path):
    write_adapter(tmp_path / "own", {})
    with pytest.raises(ModelError, match=r"reading the LoRA adapter own failed: .* holds no LoRA weights"):
        serve("torch", adapted("llama").base, ["own"], tmp_path)


def test_an_adapter_that_cannot_be_loaded_at_run_time_is_named_in_one_line(adapted, tmp_path):
    base = adapted("llama").base
    model = serve("torch", base, [], lora_folder=str(tmp_path), api_key="secret")
    for name, said in wrong_adapters(tmp_path, 48):
        with pytest.raises((ModelError, ConfigError)) as refused:
            model.adapters.copied().add(name, source.load_updates(settings(base), "wrong", str(tmp_path / name)))
        message = shortened(refused.value)
        assert said in message, name


@pytest.mark.parametrize(
    ("settings", "tensor"),
    [
        ({"use_dora": True, "target_modules": ["q_proj"]}, "lora_magnitude_vector"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "layernorm"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_B.bias"),
    ],
)
def test_what_is_more_than_plain_lora_is_refused_by_the_name_of_its_tensor(adapted, tmp_path, settings, tensor):
    made = adapted("qwen2")
    save_adapter(made.base, tmp_path / "own", **settings)
    with pytest.raises(ModelError, match=rf"holds \S*{tensor}\S*, and requests can choose plain LoRA.* --merge-lora"):
        serve("openvino", made.base, ["own"], tmp_path)


def test_an_adapter_is_read_once_and_the_model_is_not_converted_again(adapted, conversions, monkeypatch):
    made = adapted("llama")
    made.serve("openvino", names=())
    conversions.clear()
    made.serve("openvino")
    monkeypatch.setattr(source, "run_module", None)
    made.serve("openvino")
    assert conversions == []


def test_on_neuron_adapters_by_request_are_refused_by_name(adapted):
    made = adapted("llama")
    with pytest.raises(ModelError, match=r"--lora-adapters \(LORA_ADAPTERS\) is for CPUs and GPUs; on Neuron --merge-lora"):
        models.prepare(replace(settings(made.base, lora_adapters=("a=b/c",)), device="neuron"))


def test_a_call_has_at_most_512_columns_or_one_adapter():
    """Of more, matrix libraries sum the products of an adapter in an order that depends on where its columns lie."""
    ranks = (300, 16, 200, 600, 1)  # 304, 16, 208, 608 and 16 columns
    columns = [np.ones((rank, 1), np.float32) for rank in ranks]
    adapters = Adapters({"layer": (1, 1)}, {f"of rank {len(each)}": {"layer": (each, each)} for each in columns})
    assert adapters.groups([5, 0, 1, 2, 3, 4, 1]) == [[1, 2, 6, 3], [4], [5], [0]]
    assert adapters.groups([0, 0]) == [[0, 1]] and adapters.groups([4, 4]) == [[0, 1]]
    assert adapters.columns_of([3, 0, 2]) == (304, 528) and adapters.columns_of([0]) == (0, 0)
    assert adapters.mask([0, 2], (304, 528)).sum(axis=1).tolist() == [0, 16]
