"""Guesses from a request's own text, and steps that verify them: the texts are those without, whatever is guessed."""

import itertools
import random

import pytest
from fakes.model import EOS, VOCABULARY, greedy
from hypothesis import settings
from loop import ENGINES, Driven, NoMetrics, Oracle

import worker
from engine.sampling.ngram_proposer import INITIAL_DRAFT_TOKENS, MAX_COPIES, MAX_PAUSE, NgramProposer
from protocol import Cancel, Generate, SamplingParams


def lookup(prompt, generated, prediction=()):
    made = NgramProposer(prompt, prediction, 1000)
    made.add(generated)
    return made


def test_what_followed_the_last_tokens_before_is_guessed():
    assert lookup([1, 2, 3, 4, 5, 6, 9], [1, 2]).propose(3) == [3, 4, 5]


def test_the_longest_earlier_copy_counts_and_of_equal_ones_the_latest():
    assert lookup([7, 1, 2, 3, 8, 1, 2, 4], [7, 1, 2]).propose(1) == [3]
    assert lookup([1, 2, 3, 1, 2, 4, 9], [1, 2]).propose(1) == [4]


@pytest.mark.parametrize(("others", "draft"), [(MAX_COPIES - 1, [5]), (MAX_COPIES, [])])
def test_of_a_token_that_a_text_is_full_of_only_the_latest_copies_are_compared(others, draft):
    assert lookup([9, 7, 5, *[8, 7] * others], [9, 7]).propose(1) == draft


def test_a_text_that_repeats_itself_is_guessed_as_far_as_it_goes():
    assert lookup([1, 2, 3], [1, 2]).propose(10) == [3, 1, 2]


def test_image_tokens_are_found_again_and_end_the_draft():
    image = [-1 - (2**45 << 16) - n for n in range(3)]
    assert lookup([1, 2, 3, *image, 4], [1, 2]).propose(5) == [3]
    assert lookup([1, 2, *image, 4], [1, 2]).propose(5) == []


@pytest.mark.parametrize("generated", [[5], [9, 8], [2]])
def test_one_equal_token_is_chance(generated):
    assert lookup([1, 2, 3, 4], generated).propose(4) == []


def test_a_prediction_is_guessed_from_its_beginning_and_found_again_after_a_change():
    prediction = [11, 12, 13, 14, 15, 16, 17, 18]
    assert lookup([1, 2, 3], [11], prediction).propose(2) == [12, 13]
    assert lookup([1, 2, 3], [11, 12, 99, 14], prediction).propose(2) == []
    assert lookup([1, 2, 3], [11, 12, 99, 14, 15], prediction).propose(2) == [16, 17]
    assert lookup([1, 2, 3], [4], prediction).propose(2) == []


def test_guesses_become_more_while_they_are_right_and_fewer_when_they_are_not():
    text = list(range(1, 100))
    made = lookup(text, [1, 2])
    assert len(made.propose(50)) == INITIAL_DRAFT_TOKENS
    made.record_acceptance(INITIAL_DRAFT_TOKENS, INITIAL_DRAFT_TOKENS)
    assert len(made.propose(50)) == 2 * INITIAL_DRAFT_TOKENS
    made.record_acceptance(8, 2)
    assert len(made.propose(50)) == 4


def test_a_request_whose_guesses_are_wrong_pauses_longer_and_longer_and_tries_again():
    made, text = lookup([1, 2] * 20, [1, 2]), itertools.cycle([1, 2])

    def pause_after_a_miss():
        assert made.propose(5)
        made.record_acceptance(1, 0)
        for tokens in itertools.count():
            if made.propose(5):
                return tokens
            made.add([next(text)])

    assert [pause_after_a_miss() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 64, 64, MAX_PAUSE]
    made.record_acceptance(1, 1)
    assert pause_after_a_miss() == 1


def test_no_guess_goes_beyond_what_is_asked_for():
    assert lookup([1, 2, 3, 4, 5], [1, 2]).propose(0) == []
    assert lookup([1, 2, 3, 4, 5], [1, 2]).propose(1) == [3]


# Steps with guesses

EXAMPLES = settings.default.max_examples
KINDS = [
    SamplingParams(),
    SamplingParams(seed=3, temperature=1.5),
    SamplingParams(seed=4, top_k=5, temperature=2.0),
    SamplingParams(seed=5, top_p=0.8),
    SamplingParams(seed=6, min_p=0.1, typical_p=0.9),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(seed=7, presence_penalty=1.0, logit_bias=[(4, 5.0), (EOS, 2.0)]),
]


def requests_of(chance):
    for n in range(chance.randrange(2, 9)):
        prompt = [chance.randrange(1, VOCABULARY) for _ in range(chance.choice([1, 2, 3, 7, 20]))]
        wanted = {"logprobs": chance.random() < 0.4, "min_new_tokens": chance.choice([0, 0, 5])}
        wanted |= {"top_n_tokens": 2} if wanted["logprobs"] else {}
        wanted |= {"prompt_logprobs": True} if chance.random() < 0.1 else {}
        yield Generate(n, prompt, chance.randrange(1, 41 - len(prompt)), sampling=chance.choice(KINDS), **wanted)


def played(requests, engine, seed, known=None, cancelled=()):
    """Everything that is sent for each request, and the worker."""
    chance = random.Random(seed)
    metrics = None if known else NoMetrics()
    verify_length = chance.choice([2, 4, 9])
    driven = Driven(verify_length=verify_length if known else 1, metrics=metrics, **engine)
    oracles = {request.id: Oracle(known[request.id], chance) for request in requests} if known else {}
    waiting = iter(requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "NgramProposer", lambda *_: oracles[next(waiting).id])
        for request in requests:
            driven.arrive(request)
            driven.step()
            for _ in range(chance.randrange(4)):
                if not driven.is_idle:
                    driven.step()
            for number in cancelled:
                if chance.random() < 0.2:
                    driven.arrive(Cancel(number, "on purpose"))
        driven.run()
    sent = {request.id: [] for request in requests}
    for _peer, message in driven.wire.sent:
        for token in getattr(message, "tokens", []):
            sent[token.id].append((token.token, token.logprob, token.top, token.finish_reason))
    return sent, driven


@pytest.mark.random_examples
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_random_schedules_give_the_tokens_log_probabilities_and_ends_of_single_steps(engine):
    accepted = 0
    for seed in range(EXAMPLES):
        chance = random.Random(seed)
        requests = list(requests_of(chance))
        plain, _ = played(requests, engine, seed)
        known = {number: [token for token, *_ in tokens] for number, tokens in plain.items()}
        guessed, driven = played(requests, engine, seed, known)
        assert guessed == plain
        assert driven.worker.scheduler.busy == 0 and set(driven.ends) == set(known)
        accepted += driven.worker.metrics.series("speculation_accepted_tokens")._value.get()
    assert accepted > 5 * EXAMPLES


@pytest.mark.random_examples
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_request_that_is_cancelled_leaves_the_texts_of_the_others(engine):
    for seed in range(EXAMPLES):
        requests = list(requests_of(random.Random(seed)))
        plain, _ = played(requests, engine, seed)
        known = {number: [token for token, *_ in tokens] for number, tokens in plain.items()}
        guessed, _ = played(requests, engine, seed, known, cancelled=[0, 1])
        for number in range(2, len(requests)):
            assert guessed[number] == plain[number]
        for number in (0, 1):
            assert guessed[number] == plain[number][: len(guessed[number])]


def test_a_step_has_no_guesses_where_half_of_the_requests_have_none_or_a_prompt_runs():
    driven = Driven(
        batch_size=3, supports_chunked_prefill=True, verify_length=4, max_total_tokens=40, max_batch_prefill_tokens=2
    )
    driven.each_call(lambda chunks: calls.append(chunks))
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        texts = iter([greedy([5], 30), []])  # the second has no guesses
        patch.setattr(worker, "NgramProposer", lambda *_: Sure(next(texts)))
        driven.arrive(Generate(1, [5], 20, ignore_eos=True))
        driven.step(2)
        assert calls[-1][0].verify
        driven.arrive(Generate(2, list(range(1, 10)), 6, ignore_eos=True))
        while 2 not in driven.ends:
            driven.step()
            assert not any(chunk.verify for chunk in calls[-1])
        driven.step()
        assert calls[-1][0].verify
        driven.run()


class Sure(Oracle):
    def __init__(self, text):
        super().__init__(text, None)

    def propose(self, most):
        return self.text[self.done : self.done + most]


def test_rows_share_the_budget_of_a_step_and_no_guess_is_made_for_more_tokens_than_a_request_may_have():
    driven = Driven(batch_size=3, supports_chunked_prefill=True, verify_length=6)
    driven.model.max_draft_rows = 8
    calls = []
    driven.each_call(lambda chunks: calls.append(chunks))
    with pytest.MonkeyPatch.context() as patch:
        texts = {n: greedy([n], 30) for n in (3, 7)}
        waiting = iter(texts.values())
        patch.setattr(worker, "NgramProposer", lambda *_: Sure(next(waiting)))
        driven.arrive(*(Generate(n, [n], 12, ignore_eos=True) for n in texts))
        driven.run()
    together = [[len(chunk.tokens) for chunk in chunks] for chunks in calls if len(chunks) == 2]
    assert [4, 4] in together and max(map(sum, together)) == 8
    assert all(chunk.begin + len(chunk.tokens) <= 1 + 12 for chunks in calls for chunk in chunks)
