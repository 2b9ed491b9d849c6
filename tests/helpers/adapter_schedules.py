"""Random schedules of requests with LoRA adapters, through the worker's loop: each request gets what it gets alone.

With prefixes that slots hold and copies of them, chunks of prompts, draft tokens, grammars, log-probabilities and cancels.
"""

from collections import defaultdict
from functools import cache
from random import Random
from unittest import mock

from fakes.model import EOS
from grammars import grammars_of
from loop import Driven, NoMetrics, Oracle
from tiny_tokenizers import byte_level

import worker
from protocol import Cancel, Generate, SamplingParams, Tokens
from text.grammar import of_regex

TEXTS = [list(range(3, 22)), [*range(3, 11), 300, 301, 302], [7, 8] * 6]  # two of them begin in the same way
GRAMMARS = ["", "", of_regex("[0-9]{3}-[a-z]{2}"), of_regex("[a-z]{1,30}")]
NEW_TOKENS = 16


@cache
def vocabulary():
    """Tokens are pieces of text, as grammars need them: the number of tokens, and the grammars of a worker."""
    tokenizer = byte_level()
    return tokenizer.get_vocab_size(), grammars_of(tokenizer, eos_token_ids=[EOS])


def random_requests(chance, adapters):
    """In the order of their arrival."""
    requests = []
    for number in range(chance.randint(4, 12)):
        text = chance.choice(TEXTS)
        greedy = SamplingParams()
        warm = SamplingParams(seed=number, temperature=1.5, top_p=0.9, repetition_penalty=1.1)
        request = Generate(
            number,
            [*text[: chance.choice([5, len(text)])], *chance.choices(range(3, 399), k=chance.randrange(3))],
            chance.randint(1, NEW_TOKENS),
            sampling=chance.choice([greedy, warm]),
            adapter=chance.choice(["", *adapters]),
            grammar=chance.choice(GRAMMARS),
            prompt_logprobs=chance.random() < 0.2,
            top_n_tokens=chance.choice([0, 2]),
        )
        requests.append(request)
    return requests


def outputs(driven):
    """By request: its tokens with their log-probabilities, and the log-probabilities of its prompt."""
    found = defaultdict(list)
    for _peer, message in driven.wire.sent:
        if isinstance(message, Tokens):
            for token in message.tokens:
                found[token.id].append((token.token, token.logprob, token.top))
    return found, {number: prompt.scores for number, prompt in driven.prompts.items()}


def check_schedule(model, seed, **limits):
    """Runs a random schedule on a model with adapters. Returns the drafts that were accepted, the prompt tokens that slots
    held, and the requests that ended by themselves."""
    chance = Random(seed)
    requests = random_requests(chance, list(model.adapters.numbers))
    _size, grammars = vocabulary()
    texts = {}
    prompts = {}
    for request in requests:
        driven = Driven(served=model, grammars=grammars, metrics=NoMetrics(), **limits)
        driven.arrive(request)
        driven.run()
        found, of_prompt = outputs(driven)
        texts[request.id] = found[request.id]
        prompts[request.id] = of_prompt[request.id]
    waiting = iter(requests)

    def proposer(*_):
        return Oracle([token for token, *_ in texts[next(waiting).id]], chance)

    driven = Driven(served=model, grammars=grammars, **limits)
    arriving = list(requests)
    with mock.patch.object(worker, "NgramProposer", proposer):
        while arriving:
            for _ in range(min(len(arriving), chance.choice([0, 0, 1, 3]))):
                driven.arrive(arriving.pop(0))
            if chance.random() < 0.1:
                driven.arrive(Cancel(chance.choice(requests).id, "test"))
            driven.arrive(Cancel(10**9, "keeps the loop from waiting"))
            driven.step()
        driven.run()
    found, of_prompt = outputs(driven)
    for request in requests:
        tokens = found[request.id]
        assert tokens == texts[request.id][: len(tokens)], f"seed {seed}: {request}"
        assert of_prompt.get(request.id, prompts[request.id]) == prompts[request.id], f"seed {seed}: {request}"
        assert driven.ends[request.id] == "cancelled" or len(tokens) == len(texts[request.id]), f"seed {seed}: {request}"
    accepted = driven.worker.metrics.series("speculation_accepted_tokens")._value.get()
    held = sum(prompt.cached for prompt in driven.prompts.values())
    return accepted, held, sum(reason != "cancelled" for reason in driven.ends.values())
