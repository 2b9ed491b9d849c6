"""Published weights on the real library: SmolLM2-135M-Instruct (Llama) and Gemma 3 270M get the texts of transformers 5, which
made the checkpoints from GGUF files."""

import json
import os
import subprocess

import pytest
from loop import Driven
from published.reference import TOKENS
from published.weights import PROMPTS, WHY, is_installed
from test_server import cores, serve  # noqa: F401
from test_transformers5 import NO_PYTHON, PYTHON

from protocol import Generate
from run import HERE

pytestmark = [NO_PYTHON, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("name", "tp_degree", "count"), [("smollm2", 2, len(PROMPTS)), ("gemma3", 1, 12)])
def test_every_prompt_is_continued_as_transformers_does_it(tmp_path, name, tp_degree, count):
    """In a batch, in chunks, while others join and leave."""
    if not is_installed(name):
        pytest.skip(WHY)
    command = [PYTHON, "-m", "published.weights", name]
    printed = subprocess.check_output(
        command, text=True, env=os.environ | {"PYTHONPATH": f"{HERE}/tests:{HERE}/tests/helpers:{HERE}"}
    )
    expected = json.loads(printed.splitlines()[-1])
    prompts = expected["prompts"][:count]
    length = max(map(len, prompts)) + TOKENS
    limits = {"max_batch_size": 4, "max_total_tokens": length, "max_input_tokens": length - 1}
    chunks = {"prefill_chunk": 32, "prefill_buckets": (32,)}
    served = serve(None, tmp_path, expected["folder"], tp_degree=tp_degree, **chunks, **limits)
    assert served.prefill_chunk == 32
    driven = Driven(served=served)
    for n, prompt in enumerate(prompts):
        driven.arrive(Generate(n, prompt, TOKENS, ignore_eos=True))
        driven.step()
    driven.run()
    for n, tokens in enumerate(expected["continuations"][:count]):
        assert driven.tokens[n][: len(tokens)] == tokens
