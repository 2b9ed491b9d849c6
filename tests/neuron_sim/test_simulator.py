"""transformers-neuronx itself on the simulator, compared with the same tiny random model in transformers.

Nothing of the server is tested here. These are the facts that models/neuron/model.py relies on: how forward() is called under
continuous batching, which calls raise, and which silently corrupt a sequence and so must never be made.
"""

import pytest
import torch
import transformers
import transformers_neuronx as neuronx
from family_models import Reference
from torch_neuronx import simulator
from transformers_neuronx import ContinuousBatchingConfig, GenerationConfig, LlamaForSampling, NeuronConfig

SLOTS = 4
VOCABULARY = 256
SHORT, LONG, TINY = ([(start + 97 * step) % 255 + 1 for step in range(length)] for start, length in ((3, 10), (50, 37), (7, 5)))

SMALL = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,  # wide, so that greedy text varies
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
ARCHITECTURES = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama, grouped": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "llama, long": lambda: transformers.LlamaConfig(**SMALL | {"max_position_embeddings": 8192}),
    "mistral": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_key_value_heads=2, sliding_window=None, num_local_experts=4),
}


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    made = {}

    def make(name="llama"):
        if name not in made:
            made[name] = Reference(ARCHITECTURES[name](), tmp_path_factory.mktemp("checkpoint"))
        return made[name]

    return make


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def loaded(reference, model_class=LlamaForSampling, neuron=None, **changes):
    """With its weights on the host: nothing is compiled yet."""
    batching = ContinuousBatchingConfig(batch_size_for_shared_caches=SLOTS)
    settings = {"tp_degree": 1, "amp": "f32", "n_positions": 128, "context_length_estimate": [32, 64]}
    settings |= {"batch_size": SLOTS, "neuron_config": NeuronConfig(continuous_batching=batching, **neuron or {})}
    return model_class.from_pretrained(reference.folder, **settings | changes)


def built(*arguments, **settings):
    model = loaded(*arguments, **settings)
    model.to_neuron()
    return model


def prefill(model, prompt, slot):
    return model(torch.tensor([prompt]), torch.arange(len(prompt))[None], torch.tensor([slot]))


def decode(model, tokens, positions, slots):
    return model(torch.tensor(tokens)[:, None], torch.tensor(positions)[:, None], torch.tensor(slots))


def greedy(logits):
    return logits.argmax(-1).tolist()


def device_tokens(tokens):
    assert tokens.dtype == torch.int32
    return tokens[:, 0].tolist()


def generating(**settings):
    return {"on_device_embedding": True, "on_device_generation": GenerationConfig(**settings)}


def assert_serves(model, reference, count=16, pick=greedy):
    """One request decodes in slot 2; after six tokens another joins it in slot 0."""
    tokens = {2: [], 0: []}
    prompts = {2: SHORT, 0: LONG}
    tokens[2] += pick(prefill(model, SHORT, 2))
    while len(tokens[2]) < count:
        if len(tokens[2]) == 6:
            tokens[0] += pick(prefill(model, LONG, 0))
        live = [slot for slot in tokens if tokens[slot]]
        positions = [len(prompts[slot]) + len(tokens[slot]) - 1 for slot in live]
        for slot, token in zip(live, pick(decode(model, [tokens[slot][-1] for slot in live], positions, live))):
            tokens[slot].append(token)
    assert tokens[2] == reference.greedy(SHORT, count)
    assert tokens[0] == reference.greedy(LONG, len(tokens[0])) and len(tokens[0]) == count - 5


def assert_alike(logits, expected):
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "name, settings",
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("llama", {"n_positions": [32, 64, 128]}, id="several lengths"),
        pytest.param("llama", {"n_positions": [32, 128], "context_length_estimate": None}, id="context buckets by default"),
        pytest.param("llama", {"tp_degree": 2}, id="two cores"),
        pytest.param("llama", {"neuron": {"attention_layout": "BSH", "fuse_qkv": True}}, id="fused qkv"),
        pytest.param("llama", {"neuron": {"on_device_embedding": True}}, id="embedding on the device"),
        pytest.param("llama, grouped", {}, id="grouped query attention"),
        pytest.param("llama, grouped", {"tp_degree": 4}, id="more cores than key heads"),
        pytest.param("mistral", {"model_class": neuronx.MistralForSampling}, id="mistral"),
    ],
)
def test_a_request_that_joins_late_and_the_one_it_joins_get_their_own_text(reference, name, settings):
    assert_serves(built(reference(name), **settings), reference(name))


def test_bfloat16_is_off_by_what_bfloat16_rounds(reference):
    exact = reference().logits(SHORT)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(reference().folder).bfloat16()
    expected = (rounded(torch.tensor([SHORT])).logits[0, -1].float() - exact).abs().max()
    logits = prefill(built(reference(), amp="bf16"), SHORT, 2)
    assert logits.dtype == torch.float32
    assert (logits[0] - exact).abs().max() < 3 * expected


def test_a_prompt_of_thousands_of_tokens_goes_through_the_kernel_for_long_ones(reference):
    model = built(reference("llama, long"), n_positions=4224, context_length_estimate=[4096])
    prompt = [step * step % 255 + 1 for step in range(4000)]
    assert_alike(prefill(model, prompt, 1)[0], reference("llama, long").logits(prompt))


def test_a_position_runs_in_the_smallest_bucket_that_holds_it(reference):
    model = built(reference(), n_positions=[32, 64, 128])
    tokens, buckets = greedy(prefill(model, TINY, 1)), []
    while len(tokens) < 65:
        tokens += greedy(decode(model, [tokens[-1]], [len(TINY) + len(tokens) - 1], [1]))
        buckets += simulator.cache_lengths(simulator.executions[-1])
    assert tokens == reference().greedy(TINY, 65)
    assert buckets == [next(size for size in (32, 64, 128) if size > len(TINY) + step) for step in range(64)]


def test_a_prompt_may_fill_the_largest_context_bucket_and_a_text_the_largest_positions(reference):
    model = built(reference())
    prompt = (LONG + LONG)[:64]
    assert_alike(prefill(model, prompt, 0)[0], reference().logits(prompt))
    decode(model, [5], [127], [0])


LINES = {"top_k": [1] * SLOTS, "top_p": [1.0] * SLOTS, "temperature": [1.0] * SLOTS, "top_p_min_tokens": [1] * SLOTS}


@pytest.mark.parametrize("tp_degree", [1, 2])
@pytest.mark.parametrize(
    "generation",
    [
        pytest.param({"do_sample": False}, id="greedy"),
        pytest.param({"do_sample": True, "dynamic": True, "global_top_k": 16, "top_k": 1}, id="of the 16 most likely"),
        pytest.param({"do_sample": True, "dynamic": True, "per_batch_line": True} | LINES, id="line by line"),
    ],
)
def test_the_device_picks_the_most_likely_token(reference, generation, tp_degree):
    model = built(reference(), neuron=generating(**generation), tp_degree=tp_degree)
    assert_serves(model, reference(), pick=device_tokens)


def test_the_device_draws_each_token_as_often_as_it_is_likely(reference):
    likely, tokens = reference().logits(SHORT).softmax(-1).topk(4)
    model = built(reference(), neuron=generating(do_sample=True, top_k=4))
    drawn = torch.cat([prefill(model, SHORT, 0) for _ in range(300)])
    assert ((drawn == tokens).float().mean(0) - likely / likely.sum()).abs().max() < 0.12  # four standard deviations


def test_for_nan_logits_the_device_silently_samples_token_0(tmp_path):
    spoilt = Reference(ARCHITECTURES["llama"](), tmp_path)
    spoilt.model.model.norm.weight.data.fill_(float("nan"))
    spoilt.model.save_pretrained(tmp_path)
    generation = {"do_sample": True, "dynamic": True, "per_batch_line": True, "global_top_k": 16}
    model = built(spoilt, neuron=generating(**generation | LINES))
    assert device_tokens(prefill(model, SHORT, 1)) == [0]
    assert device_tokens(decode(model, [5], [len(SHORT)], [1])) == [0]


@pytest.mark.parametrize(
    "error, message, ids, positions, slots",
    [
        pytest.param(
            AssertionError, "65 <= 64", [[1] * 65], [[*range(65)]], [0], id="a prompt beyond the largest context bucket"
        ),
        pytest.param(StopIteration, "", [[5]], [[128]], [0], id="a position beyond the largest n_positions"),
        pytest.param(RuntimeError, "out of bounds", [[5]], [[3]], [SLOTS], id="a slot that is not there, in decode"),
        pytest.param(AssertionError, "speculative", [[5, 6, 7]], [[4, 5, 6]], [1], id="a prompt that goes on from a position"),
        pytest.param(AssertionError, "n_active_seqs", [[5, 6]], [0, 1], [1], id="flat cache_ids, in prefill"),
        pytest.param(IndexError, "", [[5]], [3], [1], id="flat cache_ids, in decode"),
        pytest.param(KeyError, "", [[5, 6], [5, 6]], [[0, 1], [0, 1]], [1], id="fewer slots than prompts"),
        pytest.param(IndexError, "", [[VOCABULARY + 9, 6]], [[0, 1]], [1], id="a token beyond the vocabulary"),
    ],
)
def test_a_call_out_of_range_fails_and_the_next_one_works(reference, error, message, ids, positions, slots):
    model = built(reference())
    with pytest.raises(error, match=message):
        model(torch.tensor(ids), torch.tensor(positions), torch.tensor(slots))
    assert_alike(prefill(model, SHORT, 2)[0], reference().logits(SHORT))


def test_decode_wants_ids_and_positions_of_one_integer_type(reference):
    model = built(reference())
    prefill(model, SHORT, 1)
    with pytest.raises(RuntimeError, match="scatter"):
        model(torch.tensor([[9]]), torch.tensor([[len(SHORT)]], dtype=torch.int32), torch.tensor([1]))


def test_more_cores_than_are_simulated_are_refused(reference):
    with pytest.raises(RuntimeError, match="64 cores requested, 32 simulated"):
        built(reference(), tp_degree=64)


def test_what_the_simulator_lacks_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="_to_neuron"):
        torch.ops.neuron._to_neuron(torch.zeros(1))
    with pytest.raises(NotImplementedError, match="Model"):
        torch.classes.neuron.Model(b"")


def test_data_on_the_device_cannot_be_used_on_the_host():
    buffer = torch.ops.neuron._parallel_to_neuron([torch.zeros(2, 3)])
    assert buffer.shape == (2, 3)
    with pytest.raises(RuntimeError, match="device tensor"):
        buffer + 1


def test_a_prompt_of_one_token_runs_as_decode_and_damages_a_live_slot(reference):
    model = built(reference())
    prefill(model, SHORT, 2)
    prefill(model, [7], 1)
    damage = decode(model, [9], [len(SHORT)], [2])[0] - reference().logits([*SHORT, 9])
    assert damage.abs().max() > 1e-2
