"""Published weights on the real library: SmolLM2-135M-Instruct (Llama) and Gemma 3 270M get the texts of transformers."""

import pytest
from loop import Driven
from published.reference import TOKENS
from published.weights import PROMPTS, Published
from test_server import cores, serve  # noqa: F401

from protocol import Generate


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "tp_degree", "prompts"), [("smollm2", 2, PROMPTS), ("gemma3", 1, PROMPTS[:12])])
def test_every_prompt_is_continued_as_transformers_does_it(tmp_path, name, tp_degree, prompts):
    """In a batch, in chunks, while others join and leave."""
    model = Published.of(name)
    ids = [model.ids(prompt) for prompt in prompts]
    length = max(map(len, ids)) + TOKENS
    limits = {"max_batch_size": 4, "max_total_tokens": length, "max_input_tokens": length - 1}
    served = serve(model, tmp_path, tp_degree=tp_degree, prefill_chunk=32, prefill_buckets=(32,), **limits)
    assert served.prefill_chunk == 32
    driven = Driven(served=served)
    for n, prompt in enumerate(ids):
        driven.arrive(Generate(n, list(prompt), TOKENS, ignore_eos=True))
        driven.step()
    driven.run()
    for n, prompt in enumerate(ids):
        tokens, _logprobs = model.continued(prompt)
        assert driven.tokens[n][: len(tokens)] == tokens
