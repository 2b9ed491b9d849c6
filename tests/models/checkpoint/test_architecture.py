"""What config.json alone decides: which class loads a model, and the one line for what no engine serves."""

import json
from pathlib import Path

import pytest
import tiny_models
import transformers
from published import folders
from published.configs import OTHERS
from published.families import FAMILIES, Family
from safetensors.torch import load_file
from tiny_models import POSITIONS, VOCABULARY, save_checkpoint

import manifest
from config import Config
from manifest import Manifest
from models.errors import ModelError

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]  # of torch and transformers

STATIC_BATCH = "are not supported on a static batch"
LAYERS = 2 * ["full_attention"]


@pytest.fixture(scope="module", autouse=True)
def architecture():
    """That takes seconds, which an import at this module's top costs each of pytest's workers."""
    import models.checkpoint.architecture

    return models.checkpoint.architecture


def read(folder, architecture, **changes):
    config = Config(model_id=str(folder), **{"max_total_tokens": POSITIONS, "max_input_tokens": 1} | changes)
    return architecture.read_architecture(config, Path(folder))


def refusal(folder, architecture, **changes) -> str:
    with pytest.raises(ModelError) as refused:
        read(folder, architecture, **changes)
    (line,) = str(refused.value).splitlines()
    return line


def write_config(folder, **facts):
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("family", ["llama", "gpt-oss", *tiny_models.WITH_VISION])
def test_the_parameters_of_a_model_are_counted_without_its_weights(zoo, architecture, family):
    (file,) = zoo.folder(family).glob("*.safetensors")
    stored = sum(tensor.numel() for tensor in load_file(file).values())
    assert stored <= read(zoo.folder(family), architecture).parameters < stored + 1000  # buffers are not stored


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("kind", ["phi3", "minicpm3"])
@pytest.mark.parametrize("name", ["su", "longrope"])
def test_a_longrope_is_known_by_its_first_name_and_needs_no_factor(tmp_path, architecture, kind, name, trusted):
    """As in the files that Phi-3-mini-128k and MiniCPM3-4B were published with."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    sizes |= {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "pad_token_id": None}
    rope = {"type": name, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    folder = write_config(tmp_path, model_type=kind, rope_scaling=rope, **sizes, **lengths)
    found = read(folder, architecture, max_total_tokens=32, trust_remote_code=trusted).config.rope_parameters
    assert found["rope_type"] == "longrope" and found["original_max_position_embeddings"] == 32
    assert found.get("factor", 4.0) == 4.0  # where it is said
    assert "32" in refusal(folder, architecture, max_total_tokens=33)


@pytest.mark.parametrize(
    ("kind", "facts", "why"),
    [
        ("bloom", {}, "ALiBi (attention biased by distance)"),
        ("falcon", {"alibi": True}, "ALiBi (attention biased by distance)"),
        ("gpt_neo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "local layers"),
        ("zamba2", {}, "attention shared by layers"),
        ("llama4_text", {"num_hidden_layers": 2}, "chunked_attention layers"),  # of which length?
        ("recurrent_gemma", {}, "recurrent layers"),
        ("rwkv", {}, "recurrent layers"),
        ("openai-gpt", {}, "layers without a KV cache"),
        ("xglm", {}, "attention code of its own"),
        ("diffusion_gemma", {}, "diffusion of many tokens at a time"),
        ("bert", {}, "attention in both directions"),
        ("xlm-roberta", {}, "attention in both directions"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention in both directions"),  # EmbeddingGemma
        ("paligemma", {"text_config": {"model_type": "gemma2"}, "vision_config": {}}, "attention in both directions"),
    ],
)
def test_a_family_whose_state_or_attention_slots_cannot_share_is_refused_by_name(tmp_path, architecture, kind, facts, why):
    folder = write_config(tmp_path, model_type=kind, **facts)
    assert refusal(folder, architecture) == f"{kind} models with {why} {STATIC_BATCH}"


REFUSED = [family for family in FAMILIES if family.refused and "encoder" not in family.refused]


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.id)
def test_the_published_config_of_a_family_that_is_not_served_says_why_in_one_line(tmp_path, architecture, family):
    assert family.refused in refusal(write_config(tmp_path, **family.config), architecture, max_total_tokens=0)


# The kinds of the first layers of published models, by their initials.
KINDS = {
    "Qwen/Qwen3.5-4B": "LLLF",  # layer_types of the text part
    "Qwen/Qwen3.5-35B-A3B": "LLLF",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "LLLF",  # full_attention_interval
    "allenai/Olmo-Hybrid-7B": "LLLF",
    "ibm-granite/granite-4.0-h-tiny": "LLLLLF",  # mamba and attention
    "ibm-granite/granite-4.0-micro": "FFFF",
    "nvidia/Nemotron-H-8B-Reasoning-128K": "LmLmLmLF",  # M-*
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "LMLMLF",  # ME*
    "ibm-ai-platform/Bamba-9B-v2": "LLLLLLLLLF",  # attn_layer_indices
    "ai21labs/AI21-Jamba-Mini-1.6": "LLLLF",  # attn_layer_period
    "tiiuae/Falcon-H1-1.5B-Instruct": "HHHH",  # none
    "state-spaces/mamba-130m-hf": "LLLL",
    "mistralai/Mamba-Codestral-7B-v0.1": "LLLL",
    "tiiuae/falcon-mamba-7b-instruct": "LLLL",
    "LiquidAI/LFM2-1.2B": "CCFC",  # full_attn_idxs
    "LiquidAI/LFM2.5-1.2B-Instruct": "CCFC",
    "LiquidAI/LFM2-8B-A1B": "CCFC",
}
INITIALS = {"linear_attention": "L", "full_attention": "F", "hybrid": "H", "conv": "C", "moe": "M", "mlp": "m"}


@pytest.mark.parametrize("name", KINDS)
def test_the_kinds_of_layers_of_a_published_hybrid_are_known_in_each_spelling(tmp_path, architecture, name):
    config = folders.small(Family("", name).config, VOCABULARY)
    kinds = read(write_config(tmp_path, **config), architecture).config.get_text_config().layer_types
    assert "".join(INITIALS[kind] for kind in kinds) == KINDS[name]


@pytest.mark.parametrize("name", KINDS)
def test_only_layers_with_attention_count_for_the_kv_cache_of_a_published_hybrid(tmp_path, name):
    """As many bytes a token as the config of transformers says; none is known for models without attention."""
    config = Family("", name).config
    text = folders.known(config).get_text_config()
    layers = sum(kind in ("full_attention", "hybrid") for kind in text.layer_types)
    expected = None
    if layers:
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        expected = 2 * 4 * layers * size * text.num_key_value_heads
    assert Manifest.read(write_config(tmp_path, **config)).kv_bytes == expected
    folders.known(config).save_pretrained(tmp_path)  # under the newest names
    assert Manifest.read(tmp_path).kv_bytes == expected


def test_a_pattern_of_layers_wins_over_their_number(tmp_path, architecture):
    config = folders.small(OTHERS["nvidia/Nemotron-H-8B-Reasoning-128K"], VOCABULARY) | {"num_hidden_layers": 3}
    folder = write_config(tmp_path, **config)
    assert len(read(folder, architecture).config.layer_types) == 8
    one = write_config(tmp_path, **config | {"num_hidden_layers": 8})
    assert Manifest.read(folder).kv_bytes == Manifest.read(one).kv_bytes


def test_recurrent_layers_of_a_family_that_is_not_known_are_refused(tmp_path, architecture):
    """Such as of families that a later transformers has: they may be computed in another way."""
    line = refusal(write_config(tmp_path, model_type="bailing_hybrid"), architecture)
    assert line == f"bailing_hybrid models with linear_attention layers {STATIC_BATCH}"


@pytest.mark.parametrize("kind", ["t5", "vit"])
def test_what_is_no_causal_language_model_is_refused(tmp_path, architecture, kind):
    line = refusal(write_config(tmp_path, model_type=kind), architecture)
    assert line == f"{kind} models do not continue text token by token (no causal language model); nothing to serve"


def test_an_unknown_model_type_is_refused_by_name(tmp_path, architecture):
    assert "llama7000" in refusal(write_config(tmp_path, model_type="llama7000"), architecture)


@pytest.mark.parametrize("kind", manifest.TEXT_DEFAULTS)
def test_what_a_text_config_leaves_out_is_read_as_transformers_reads_it(tmp_path, kind):
    config = transformers.CONFIG_MAPPING[kind]()
    assert {name: getattr(config, name) for name in manifest.TEXT_DEFAULTS[kind]} == manifest.TEXT_DEFAULTS[kind]
    nested, own = (tmp_path / name for name in ("nested", "own"))
    for folder, facts in (
        (nested, {"model_type": "llava", "text_config": {"model_type": kind}}),
        (own, {name: value for name, value in config.to_dict().items() if name not in ("dtype", "torch_dtype")}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(facts))
    found, expected = Manifest.read(nested), Manifest.read(own)
    assert found.kv_bytes == expected.kv_bytes and found.max_positions == expected.max_positions
    assert found.kv_bytes and found.max_positions


@pytest.mark.parametrize("kind", manifest.VISION_FAMILIES)
def test_what_the_config_of_a_vision_family_leaves_out_is_as_transformers_has_it(kind):
    own = json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    family = manifest.VISION_FAMILIES[kind]
    assert {name: own.get(name, value) for name, value in family.defaults.items()} == family.defaults
    found = manifest.vision_part({"model_type": kind, "vision_config": {}})
    expected = manifest.vision_part(own)
    assert json.loads(json.dumps(found)) == {name: expected[name] for name in found}


@pytest.mark.parametrize("kind", manifest.VISION_DEFAULTS)
def test_what_a_vision_config_leaves_out_is_as_transformers_has_it(kind):
    own = transformers.CONFIG_MAPPING[kind]()
    given = manifest.vision_part({"vision_config": {"model_type": kind, "image_size": None, "patch_size": [14, 14]}})
    assert given.pop("patch_size") == 14
    assert {name: getattr(own, name, value) for name, value in given.items()} == given


def test_attention_in_chunks_is_served_within_one_chunk(zoo, architecture):
    folder = zoo.folder("llama-4")
    assert read(folder, architecture, max_total_tokens=POSITIONS).parameters
    longer = refusal(folder, architecture, max_total_tokens=POSITIONS + 1)
    assert longer.endswith(f"beyond {POSITIONS} tokens; give --max-total-tokens {POSITIONS} or less")


OWN = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
OWN_CONFIG = """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own"
"""
OWN_MODEL = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def with_code(folder, config=OWN_CONFIG, model=OWN_MODEL, version="4.37.0"):
    save_checkpoint(folder, tiny_models.llama())
    tiny_models.edit_config(folder, model_type="own", auto_map=OWN, transformers_version=version)
    (folder / "configuration_own.py").write_text(config)
    (folder / "modeling_own.py").write_text(model)
    return folder


def test_code_that_comes_with_a_model_is_not_run_by_default(tmp_path, architecture):
    ran = tmp_path / "ran"
    folder = with_code(tmp_path, config=f"open({str(ran)!r}, 'w').close()")
    line = refusal(folder, architecture)
    assert line == "own models come with Python code; --trust-remote-code (TRUST_REMOTE_CODE) runs it"
    assert not ran.exists()


GONE = "from transformers.utils import is_gone_since_version_5\n"


@pytest.mark.parametrize("broken", [{"config": GONE + OWN_CONFIG}, {"model": GONE + OWN_MODEL}], ids=str)
def test_code_that_was_written_for_an_older_transformers_is_called_that(tmp_path, architecture, broken):
    line = refusal(with_code(tmp_path, **broken), architecture, trust_remote_code=True)
    assert f"its Python code is for transformers 4.37.0, and this server has {transformers.__version__}: " in line
    assert "is_gone_since_version_5" in line and "--trust-remote-code" not in line


def test_code_that_fails_and_that_transformers_does_not_need_is_called_that(tmp_path, architecture):
    """As PaddleOCR-VL's, which guides for other servers run with --trust-remote-code."""
    folder = write_config(tmp_path, **OTHERS["PaddlePaddle/PaddleOCR-VL"])
    (folder / "configuration_paddleocr_vl.py").write_text(GONE)
    line = refusal(folder, architecture, trust_remote_code=True)
    assert "(which has this family built in: leave --trust-remote-code out)" in line and "is_gone_since_version_5" in line


@pytest.mark.parametrize(("version", "is_named"), [("4.37.0", True), (None, True), ("5.1.0", False)])
def test_code_that_fails_when_it_runs_is_called_that_too(tmp_path, version, is_named):
    from models.pytorch.model import TorchModel

    forward = "    def forward(self, input_ids, position_ids, use_cache, past_key_values=None, attention_mask=None):\n"
    forward += "        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)\n"
    folder = with_code(tmp_path, model=OWN_MODEL + forward, version=version)
    with pytest.raises(ModelError, match="unexpected keyword argument 'logits_to_keep'") as refused:
        TorchModel(tiny_models.settings(folder, trust_remote_code=True), folder, "cpu")
    assert (f"is for transformers {version or 4}, and" in str(refused.value)) == is_named


def test_code_that_runs_is_served(tmp_path, architecture):
    folder = with_code(tmp_path)
    assert read(folder, architecture, trust_remote_code=True).config.vocab_size == VOCABULARY


def test_a_model_that_reads_images_and_comes_with_code_is_loaded_as_transformers_has_it(tmp_path, architecture):
    """In PaddleOCR-VL's published form, whose text part is not a part of its own."""
    published = OTHERS["PaddlePaddle/PaddleOCR-VL"]
    assert "AutoModelForCausalLM" in published["auto_map"]
    found = read(write_config(tmp_path, **published), architecture)
    assert found.model_class is transformers.PaddleOCRVLForConditionalGeneration
    assert found.config.get_text_config().rope_parameters["mrope_section"] == [16, 24, 24]


@pytest.mark.parametrize(
    ("image_processor", "loaded"),
    [("Qwen2VLImageProcessorFast", "Qwen3_5ForConditionalGeneration"), ("", "Qwen3_5ForCausalLM")],
)
def test_qwen35_is_loaded_without_its_tower_where_nothing_says_how_images_are_preprocessed(
    tmp_path, architecture, image_processor, loaded
):
    folder = write_config(tmp_path, **OTHERS["Qwen/Qwen3.5-4B"])
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": image_processor}))
    assert read(folder, architecture).model_class.__name__ == loaded
