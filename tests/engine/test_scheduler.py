"""What the scheduler promises to every request, whatever arrives and ends at whatever time; no model and no worker is needed.

The property tests keep their own account of what each request has been given and compare every step with it.
"""

import itertools
import math
import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from engine_parts import request_of, scheduler_of
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request, RequestGroup, RequestState
from models.base import Chunk
from protocol import Generate, Image

EOS, OTHER = 0, 7
BESIDE, ALONE, BETWEEN, BETWEEN_MANY, KEEP_ALL = 32, 256, 128, 2048, 64
MIXED = {"supports_chunked_prefill": True, "prefill_chunk": None}
WHOLE = {"supports_chunked_prefill": False, "prefill_chunk": None}
CHUNKED = {"supports_chunked_prefill": False, "prefill_chunk": 128}


def Scheduler(**limits):
    return scheduler_of(**limits)


def of_prompt(prompt, most, arrived_at=0.0, all_logits=False, **fields):
    generate = Generate(0, prompt, most, prompt_logprobs=all_logits)
    return request_of(generate, arrived_at, **fields)


def request(length, most=1000, own=0, **fields):
    """`own`: how many of the last prompt tokens no other request has."""
    prompt = [*range(100, 100 + length - own), *(random.random() for _ in range(own))]
    return of_prompt(prompt, most, **fields)


def added(scheduler, *requests):
    for each in requests:
        scheduler.add(each)
    return requests


def run_step(scheduler, now=0.0, token=OTHER):
    step = scheduler.next(now)
    return step, scheduler.update(step, [[token] if i in step.sample_indices else [] for i in range(len(step.chunks))])


def running(scheduler, count):
    """So many requests that generate; the last step was a decode step."""
    requests = added(scheduler, *(request(1) for _ in range(count)))
    while count and not all(each.generated > 1 for each in requests):
        run_step(scheduler)
    return requests


def shape(step):
    """(slot, first position, tokens) of each chunk."""
    return [(chunk.slot, chunk.begin, len(chunk.tokens)) for chunk in step.chunks]


def prompt_tokens(step):
    return [len(chunk.tokens) for chunk, each in zip(step.chunks, step.requests) if chunk.begin < len(each.prompt)]


def prompts_until_decode(scheduler):
    """How many prompt chunks run before the next decode step, of an engine that does not mix."""
    count = 0
    while prompt_tokens(run_step(scheduler)[0]):
        count += 1
    return count


# Slots, queue and ends


def test_free_slots_go_to_those_that_came_first_and_the_least_recently_used_slot_first():
    scheduler = Scheduler(slots=2, **MIXED)
    first, second, third = added(scheduler, request(3), request(3), request(3))

    run_step(scheduler)

    assert (first.slot, second.slot, third.slot) == (0, 1, None)
    assert (len(scheduler.waiting), scheduler.busy) == (1, 2)
    scheduler.remove(first)
    run_step(scheduler)
    assert (third.slot, scheduler.busy) == (0, 2)


def test_a_request_ends_at_an_eos_token_or_at_its_length_and_its_slot_is_free_for_the_next_step():
    scheduler = Scheduler(slots=2, **MIXED)
    ends_early, ignores_eos, follower = added(
        scheduler, request(3, 2, eos_token_ids={EOS}), request(3, 2), request(3, eos_token_ids={EOS})
    )

    assert run_step(scheduler)[1] == [None, None]
    assert run_step(scheduler, token=EOS)[1] == ["eos_token", "length"]

    assert (ends_early.generated, ignores_eos.generated, scheduler.busy) == (2, 2, 0)
    step, _ = run_step(scheduler)
    assert step.requests == [follower] and follower.slot == 0


def test_a_step_may_give_several_tokens_and_those_behind_an_end_do_not_count():
    scheduler = Scheduler(slots=3, **MIXED)
    goes_on, eos, length = added(scheduler, request(3), request(3, eos_token_ids={EOS}), request(3, 2))
    tokens = [[OTHER, 8], [OTHER, EOS, OTHER], [OTHER, 8, 9]]

    assert scheduler.update(scheduler.next(0.0), tokens) == [None, "eos_token", "length"]

    assert tokens == [[OTHER, 8], [OTHER, EOS], [OTHER, 8]]
    assert [each.generated for each in (goes_on, eos, length)] == [2, 2, 2]
    assert scheduler.next(0.0).chunks == [Chunk(goes_on.slot, (8,), 4)]


def test_removing_is_idempotent_and_a_token_for_a_removed_request_is_ignored():
    scheduler = Scheduler(slots=2, **MIXED)
    leaves, stays = running(scheduler, 2)
    step = scheduler.next(0.0)

    scheduler.remove(leaves)
    scheduler.remove(leaves)
    reasons = scheduler.update(step, [[OTHER], [OTHER]])

    assert reasons == [None, None] and leaves.generated == stays.generated - 1
    assert scheduler.busy == 1 and scheduler.next(0.0).requests == [stays]


def test_nothing_to_run_is_no_step():
    scheduler = Scheduler(slots=2, **MIXED)
    assert scheduler.next(0.0) is None
    (only,) = added(scheduler, request(3))
    scheduler.remove(only)
    assert scheduler.next(0.0) is None


def expired(scheduler, now):
    """The requests that have waited too long, which the worker takes out."""
    overdue = [each for each in scheduler.waiting if scheduler.is_overdue(each, now)]
    for each in overdue:
        scheduler.remove(each)
        each.state = RequestState.ENDED
    return overdue


def test_requests_expire_in_the_queue_while_a_prompt_runs_unless_their_http_request_has_a_slot():
    scheduler, group = Scheduler(slots=1, max_queue_time=10.0, **MIXED), RequestGroup()
    _, same_group, late, in_time = added(
        scheduler, request(10**4, group=group), request(3, group=group), request(3), request(3, arrived_at=2.0)
    )
    run_step(scheduler)

    assert expired(scheduler, 10.0) == []
    assert expired(scheduler, 11.0) == [late]
    assert list(scheduler.waiting) == [same_group, in_time]


def test_a_request_does_not_expire_when_another_one_of_its_http_request_has_finished():
    scheduler, group = Scheduler(slots=3, max_queue_time=10.0, waiting_served_ratio=2.0, **WHOLE), RequestGroup()
    running(scheduler, 2)
    _, second, *others = added(scheduler, request(1, 1, group=group), request(1, group=group), request(1), request(1))
    run_step(scheduler)
    run_step(scheduler)
    assert list(scheduler.waiting) == [second, *others]  # too few for a prompt to start
    assert expired(scheduler, 11.0) == others


def test_the_facts_for_metrics_follow_the_requests():
    scheduler = Scheduler(slots=2, **MIXED)
    first, second, _ = added(scheduler, request(300, 5), request(20, 7), request(1, 1))
    run_step(scheduler, now=3.0)
    assert (len(scheduler.waiting), scheduler.busy) == (1, 2)
    assert (first.started_at, second.started_at) == (3.0, 3.0)
    scheduler.remove(first)
    assert (len(scheduler.waiting), scheduler.busy) == (1, 1)


# Mixed steps


def test_a_mixed_step_has_a_row_for_every_running_request_and_as_many_prompt_tokens_as_the_budget_has():
    scheduler = Scheduler(slots=5, max_batch_prefill_tokens=32, **MIXED)
    running(scheduler, 2)
    added(scheduler, request(4), request(1000), request(900))

    step, _ = run_step(scheduler)

    rows, prompts = shape(step)[:2], shape(step)[2:]
    assert [(slot, tokens) for slot, _, tokens in rows] == [(0, 1), (1, 1)]
    assert sorted(prompts) == [(2, 0, 4), (4, 0, 28)]
    assert step.sample_indices == [0, 1, 2], "two rows, and the prompt of 4 tokens"


def test_a_prompt_gets_more_tokens_a_step_while_nobody_runs():
    scheduler = Scheduler(slots=2, **MIXED)
    added(scheduler, request(600))
    assert [prompt_tokens(run_step(scheduler)[0]) for _ in range(3)] == [[256], [256], [88]]


@pytest.mark.parametrize("budget", [8, 512])
def test_max_batch_prefill_tokens_sets_the_budget_beside_running_requests(budget):
    scheduler = Scheduler(slots=2, max_batch_prefill_tokens=budget, **MIXED)
    added(scheduler, request(2000))
    assert prompt_tokens(run_step(scheduler)[0]) == [max(budget, ALONE)]
    scheduler = Scheduler(slots=2, max_batch_prefill_tokens=budget, **MIXED)
    running(scheduler, 1)
    added(scheduler, request(2000))
    assert prompt_tokens(run_step(scheduler)[0]) == [budget]


@pytest.mark.parametrize(("engine", "expected"), [(MIXED, 50), (MIXED | {"max_batch_prefill_tokens": 8}, 8), (CHUNKED, 128)])
def test_prompts_share_the_tokens_that_a_step_has_time_for_unless_a_setting_says_how_many(engine, expected):
    for prompts in (1, 2, 4):
        scheduler = Scheduler(slots=8, **engine)
        running(scheduler, 1)
        added(scheduler, *(request(600) for _ in range(prompts)))
        assert sum(prompt_tokens(scheduler.next(0.0, 50))) == expected


def test_prompts_of_the_same_length_run_one_after_the_other():
    scheduler = Scheduler(slots=4, max_batch_prefill_tokens=8, **MIXED)
    running(scheduler, 1)
    prompts = added(scheduler, *(request(50) for _ in range(3)))
    for _ in range(7):
        run_step(scheduler)
    assert [prompt.prefilled for prompt in prompts] == [50, 6, 0]


def test_the_first_prompt_gets_half_of_the_budget_and_the_shortest_the_rest():
    scheduler = Scheduler(slots=5, max_batch_prefill_tokens=16, **MIXED)
    running(scheduler, 1)
    prompts = added(scheduler, request(1000), request(900), request(5), request(40))
    run_step(scheduler)
    assert [prompt.prefilled for prompt in prompts] == [8, 0, 5, 3]
    run_step(scheduler)
    assert [prompt.prefilled for prompt in prompts] == [16, 0, 5, 11]


def test_a_short_prompt_has_room_beside_a_long_one_where_a_chunk_takes_the_whole_budget():
    scheduler = Scheduler(slots=4, max_batch_prefill_tokens=20, chunk_granularity=32, **MIXED)
    running(scheduler, 1)
    long, short = added(scheduler, request(1000), request(20))
    run_step(scheduler)
    assert long.prefilled and short.generated


def test_a_prompt_with_all_logits_is_not_overtaken_by_a_shorter_one():
    scheduler = Scheduler(slots=3, **MIXED)
    running(scheduler, 1)
    long, short = added(scheduler, request(500, all_logits=True), request(50, all_logits=True))
    run_step(scheduler)
    assert long.prefilled > short.prefilled == 0


@pytest.mark.parametrize(("length", "parts"), [(1, [1]), (3, [3]), (8, [8]), (9, [9]), (11, [8, 3])])
def test_no_chunk_of_a_longer_prompt_has_a_single_token(length, parts):
    scheduler = Scheduler(slots=2, max_batch_prefill_tokens=8, **MIXED)
    running(scheduler, 1)
    added(scheduler, request(length))
    assert [prompt_tokens(run_step(scheduler)[0])[0] for _ in parts] == parts


@pytest.mark.parametrize(("length", "parts"), [(9, [9]), (16, [8, 8]), (17, [8, 9]), (4, [4]), (3, [3]), (20, [8, 8, 4])])
def test_chunks_end_at_multiples_of_the_models_granularity(length, parts):
    scheduler = Scheduler(slots=2, max_batch_prefill_tokens=5, chunk_granularity=4, **MIXED)
    running(scheduler, 1)
    added(scheduler, request(length))
    assert [prompt_tokens(run_step(scheduler)[0])[0] for _ in parts] == parts


def test_a_step_exceeds_its_budget_by_a_token_for_each_prompt_rather_than_leave_one():
    scheduler = Scheduler(slots=4, max_batch_prefill_tokens=4, **MIXED)
    running(scheduler, 1)
    added(scheduler, request(100), request(3))
    assert sorted(prompt_tokens(run_step(scheduler)[0])) == [2, 3]


@pytest.mark.parametrize("engine", [MIXED, CHUNKED])
@pytest.mark.parametrize("budget", [None, 16, 256])
@pytest.mark.parametrize("others", [0, 4])
def test_a_short_prompt_beside_a_long_one_has_its_first_token_within_5_steps(engine, budget, others):
    scheduler = Scheduler(slots=8, max_batch_prefill_tokens=budget, **engine)
    running(scheduler, others)
    (long,) = added(scheduler, request(4000))
    for _ in range(3):
        run_step(scheduler)
    (short,) = added(scheduler, request(20))

    for _ in range(5):
        run_step(scheduler)

    assert short.generated and not long.generated


def test_a_long_prompt_gets_half_of_the_budget_while_short_ones_come_one_after_the_other():
    scheduler = Scheduler(slots=3, **MIXED)
    running(scheduler, 1)
    (long,) = added(scheduler, request(4000))
    steps = 0
    while not long.generated:
        if scheduler.busy < 3:
            added(scheduler, request(100, 1))
        run_step(scheduler)
        steps += 1
    assert steps <= 2 * 4000 / BESIDE


def test_all_logits_of_prompts_are_kept_for_64_tokens_a_step_and_its_last_chunk_samples():
    scheduler = Scheduler(slots=4, **MIXED)
    scored, also_scored, _ = added(scheduler, request(100, all_logits=True), request(100, all_logits=True), request(500))

    step, _ = run_step(scheduler)
    assert {(len(chunk.tokens), chunk.all_logits) for chunk in step.chunks} == {(64, True), (192, False)}
    while not (scored.generated and also_scored.generated):
        step, _ = run_step(scheduler)
        assert sum(len(chunk.tokens) for chunk in step.chunks if chunk.all_logits) <= KEEP_ALL


@pytest.mark.parametrize(("length", "parts"), [(64, [64]), (65, [65]), (66, [64, 2]), (129, [64, 65])])
def test_a_prompt_with_all_logits_goes_on_where_the_models_granularity_is_all_that_it_may_run(length, parts):
    scheduler = Scheduler(slots=2, chunk_granularity=KEEP_ALL, **MIXED)
    running(scheduler, 1)
    added(scheduler, request(length, all_logits=True))
    assert [prompt_tokens(run_step(scheduler)[0])[0] for _ in parts] == parts


def test_how_many_requests_wait_changes_nothing_where_steps_are_mixed():
    scheduler = Scheduler(slots=4, waiting_served_ratio=1.0, **MIXED)
    running(scheduler, 3)
    added(scheduler, request(5))
    assert prompt_tokens(run_step(scheduler)[0]) == [5]


# Prompts and decode steps apart


def test_without_mixing_a_step_is_one_whole_prompt_or_the_rows_of_all_running_requests():
    scheduler = Scheduler(slots=3, **WHOLE)
    running(scheduler, 2)
    added(scheduler, request(1000))
    assert [shape(run_step(scheduler)[0]) for _ in range(2)] == [[(2, 0, 1000)], [(0, 2, 1), (1, 2, 1), (2, 1000, 1)]]


@pytest.mark.parametrize(("budget", "prompts"), [(1, [1, 1, 1]), (5, [2, 1]), (100, [3])])
def test_between_two_decode_steps_prompts_run_up_to_the_budget_and_one_always(budget, prompts):
    scheduler = Scheduler(slots=8, max_batch_prefill_tokens=budget, **WHOLE)
    running(scheduler, 4)
    added(scheduler, *(request(2) for _ in range(3)))
    assert [prompts_until_decode(scheduler) for _ in prompts] == prompts


@pytest.mark.parametrize(("rows", "waiting", "prompts"), [(1, 7, 3), (2, 6, 2), (4, 4, 1), (6, 2, 1)])
def test_running_requests_wait_for_several_prompts_while_more_could_start_than_run(rows, waiting, prompts):
    scheduler = Scheduler(slots=8, **WHOLE)
    running(scheduler, rows)
    added(scheduler, *(request(200) for _ in range(waiting)))
    assert prompts_until_decode(scheduler) == prompts


def test_running_requests_wait_for_no_more_than_2048_prompt_tokens():
    scheduler = Scheduler(slots=64, **WHOLE)
    running(scheduler, 1)
    added(scheduler, *(request(600) for _ in range(60)))
    assert [prompts_until_decode(scheduler) for _ in range(3)] == [3, 3, 3]


def test_prompts_start_beside_running_requests_only_for_enough_of_them_or_after_enough_steps():
    scheduler = Scheduler(slots=4, waiting_served_ratio=1.0, max_waiting_tokens=3, **WHOLE)
    running(scheduler, 1)
    added(scheduler, request(2))
    assert prompts_until_decode(scheduler) == 1, "one waits and one runs"
    added(scheduler, request(2))
    steps = [len(prompt_tokens(run_step(scheduler)[0])) for _ in range(3)]
    assert steps == [0, 0, 1], "with the step before, three decode steps"


@pytest.mark.parametrize(("length", "parts"), [(1, [1]), (128, [128]), (129, [127, 2]), (300, [128, 128, 44])])
def test_chunks_of_a_prompt_are_cut_at_fixed_positions_and_none_has_a_single_token(length, parts):
    scheduler = Scheduler(slots=3, **CHUNKED)
    (prompt,) = added(scheduler, request(length))
    chunks = []
    while not prompt.generated:
        chunks += prompt_tokens(run_step(scheduler)[0])
    assert chunks == parts


def test_running_requests_have_a_step_after_each_chunk_of_a_long_prompt():
    scheduler = Scheduler(slots=3, **CHUNKED)
    running(scheduler, 2)
    added(scheduler, request(400))
    assert [prompts_until_decode(scheduler) for _ in range(4)] == [1, 1, 1, 1]


# Prefixes


def finished(scheduler, prompt):
    """Runs the only request of the scheduler; returns it with the slot that it had."""
    each = of_prompt(prompt, 1, 0.0)
    scheduler.add(each)
    step, _ = run_step(scheduler)
    slot = step.chunks[0].slot
    while not each.generated:
        run_step(scheduler)
    return each, slot


def test_the_next_turn_of_a_chat_gets_the_slot_of_the_one_before_and_runs_only_the_rest():
    scheduler = Scheduler(slots=3, prefix_granularity=1, **MIXED)
    first_turn, other = list(range(100, 140)), list(range(500, 600))
    _, slot = finished(scheduler, first_turn)
    assert finished(scheduler, other)[1] != slot

    second, at = finished(scheduler, [*first_turn, 7, 8, 9])

    assert (second.cached, at) == (40, slot)


@pytest.mark.parametrize(("prefix_slots", "cached"), [(12, 40), (4, 0)])
def test_conversations_in_turn_keep_their_prefixes_where_there_are_slots_for_them(prefix_slots, cached):
    scheduler = Scheduler(slots=4, prefix_slots=prefix_slots, prefix_granularity=1, supports_prefix_copy=True, **MIXED)
    conversations = [[number] * 40 for number in range(100, 112)]
    for first_turn in conversations:
        finished(scheduler, first_turn)
    assert [finished(scheduler, [*first_turn, 7, 8])[0].cached for first_turn in conversations] == [cached] * 12


def test_of_more_slots_only_as_many_run_as_the_batch_has():
    scheduler = Scheduler(slots=2, prefix_slots=5, prefix_granularity=1, **MIXED)
    added(scheduler, *(request(3, own=3, most=4) for _ in range(9)))
    most = 0
    while scheduler.busy or scheduler.waiting:
        step, _ = run_step(scheduler)
        most = max(most, scheduler.busy, len(step.chunks))
    assert most == 2


def test_a_prompt_that_is_held_whole_runs_its_last_two_tokens_again():
    scheduler = Scheduler(slots=1, prefix_granularity=1, **MIXED)
    prompt = list(range(100, 140))
    assert [finished(scheduler, prompt)[0].cached for _ in range(3)] == [0, 38, 38]


def test_without_chunks_of_fixed_length_only_whole_ones_are_reused():
    scheduler = Scheduler(slots=1, prefix_granularity=128, **CHUNKED)
    prompt = list(range(300))
    assert [finished(scheduler, prompt[:end])[0].cached for end in (300, 290, 257, 130, 129, 300)] == [0, 256, 128, 128, 0, 0]


def test_generated_tokens_are_not_reused_because_decode_steps_round_differently():
    scheduler = Scheduler(slots=1, prefix_granularity=1, **MIXED)
    each = of_prompt([1, 2, 3, 4], 5, 0.0)
    scheduler.add(each)
    while each.generated < 5:
        run_step(scheduler)
    assert finished(scheduler, [1, 2, 3, 4, OTHER, OTHER, OTHER, 9, 9])[0].cached == 4


def test_a_prompt_with_log_probabilities_runs_whole():
    scheduler = Scheduler(slots=1, prefix_granularity=1, **MIXED)
    finished(scheduler, list(range(40)))
    (each,) = added(scheduler, of_prompt(list(range(40)), 1, 0.0, all_logits=True))
    run_step(scheduler)
    assert each.cached == 0


def test_a_common_system_prompt_is_copied_from_a_running_slot_where_the_model_can():
    system = list(range(100, 200))
    for copies, cached in ((True, 100), (False, 0)):
        scheduler = Scheduler(slots=2, prefix_granularity=1, supports_prefix_copy=copies, **MIXED)
        (runs,) = added(scheduler, of_prompt([*system, 1, 2, 3], 1000, 0.0))
        while not runs.generated:
            run_step(scheduler)
        (joins,) = added(scheduler, of_prompt([*system, 4, 5, 6], 1000, 0.0))
        step, _ = run_step(scheduler)
        assert joins.cached == cached
        assert step.copies == ([(1, 100, 0)] if copies else [])


@pytest.mark.parametrize("copies", [True, False])
def test_a_prefix_belongs_to_the_adapter_that_it_was_computed_with(copies):
    scheduler = Scheduler(slots=2, prefix_granularity=1, supports_prefix_copy=copies, **MIXED)
    prompt = list(range(100, 200))
    cached = []
    for adapter in (1, 2, 0, 2, 1):
        (each,) = added(scheduler, of_prompt([*prompt, len(cached), 8, 9], 1, adapter=adapter))
        while not each.generated:
            step, _ = run_step(scheduler)
            assert [chunk.adapter for chunk in step.chunks] == [adapter]
        cached.append(each.cached)
    # Of two slots the one that was used longest ago is taken: by the third request that of the first.
    assert cached == [0, 0, 0, 100, 0]


def image_ids(key, tokens):
    return [*Image(key, tokens, (1, 1, 1), b"").ids]


def pieces(prompt):
    """Texts and images, as a model that reads images whole runs them."""
    found = [[prompt[0]]]
    for before, after in itertools.pairwise(prompt):
        is_same = (before >= 0) == (after >= 0) and (after >= 0 or after == before - 1)
        found[-1].append(after) if is_same else found.append([after])
    return found


@pytest.mark.parametrize(
    "engine",
    [
        MIXED | {"prefix_granularity": 1, "supports_prefix_copy": True},
        MIXED | {"prefix_granularity": 32, "chunk_granularity": 32, "supports_prefix_copy": True},
        CHUNKED | {"prefix_granularity": 128, "supports_prefix_copy": True},
        CHUNKED,
    ],
)
def test_no_chunk_or_reused_prefix_cuts_an_image_or_leaves_one_token_of_text_beside_it(engine):
    chance = random.Random(0)
    scheduler = Scheduler(slots=2, whole_images=True, **engine)
    sizes = (2, 5, 31, 64, 126, 129, 253, 257, 300)
    starts = [[chance.choice((3, 4)) for _ in range(chance.choice(sizes))] for _ in range(2)]
    reused = 0
    for key in range(60):
        prompt = [*chance.choice(starts)]
        for n in range(chance.randrange(3)):
            prompt += image_ids(1000 + key % 3 + 10 * n, chance.choice(sizes)) + [9] * chance.choice(sizes)
        (each,) = added(scheduler, of_prompt(prompt, 1))
        granularity = scheduler.prefix_granularity or 1
        while not each.generated:
            step, _ = run_step(scheduler)
            for chunk, owner in zip(step.chunks, step.requests):
                if owner is each:
                    end = chunk.begin + len(chunk.tokens)
                    assert all(len(piece) > 1 for piece in pieces(chunk.tokens)), (chunk, prompt)
                    assert end >= len(prompt) - 2 or not engine.get("prefix_granularity") or end % granularity == 0
                    for edge in (chunk.begin, end):
                        assert edge in (0, len(prompt)) or prompt[edge] >= 0 or prompt[edge] != prompt[edge - 1] - 1
        reused += each.cached > 0
    assert reused or "prefix_granularity" not in engine


def test_a_conversation_keeps_its_slot_from_a_prompt_that_shares_little_with_it():
    scheduler = Scheduler(slots=2, prefix_granularity=1, **MIXED)
    long = list(range(1000, 1200))
    _, slot = finished(scheduler, long)
    other, at = finished(scheduler, [*long[:3], 1, 2, 3])
    assert (other.cached, at) == (0, 1 - slot)
    assert finished(scheduler, [*long, 1, 2])[0].cached == 200


def test_a_chunk_shorter_than_the_budget_is_followed_by_a_decode_step_too():
    scheduler = Scheduler(slots=3, supports_chunked_prefill=False, prefill_chunk=32)
    running(scheduler, 2)
    added(scheduler, request(100))
    assert [prompts_until_decode(scheduler) for _ in range(3)] == [1, 1, 1]


def test_a_prompt_whose_logits_are_all_kept_leaves_no_prefix_because_it_may_be_cut_elsewhere():
    scheduler = Scheduler(slots=1, prefix_granularity=1, **MIXED)
    (kept,) = added(scheduler, of_prompt(list(range(40)), 1, 0.0, all_logits=True))
    while not kept.generated:
        run_step(scheduler)
    assert finished(scheduler, list(range(40)))[0].cached == 0


def test_where_nothing_can_be_copied_and_every_slot_holds_something_any_common_prefix_decides():
    scheduler = Scheduler(slots=2, prefix_granularity=1, **MIXED)
    long = list(range(1000, 1200))
    _, slot = finished(scheduler, long)
    assert finished(scheduler, list(range(50)))[1] != slot
    other, at = finished(scheduler, [*long[:60], 1, 2, 3])
    assert (other.cached, at) == (60, slot)


def test_shorter_prompts_go_first_until_others_have_waited_longer_than_the_threshold():
    scheduler = Scheduler(slots=1, queue_threshold_ms=5000, **MIXED)
    (runs,) = added(scheduler, request(2))
    run_step(scheduler)
    old, long, short = added(scheduler, request(9), request(9, arrived_at=8.0), request(3, arrived_at=9.0))
    order = []
    for last in (runs, None, None):
        scheduler.remove(last or order[-1])
        run_step(scheduler, now=10.0)
        order += [each for each in (old, long, short) if each.slot is not None]
    assert order == [old, short, long]


def test_a_request_that_was_queued_late_goes_first_when_it_has_waited_longer_than_the_threshold():
    scheduler = Scheduler(slots=1, queue_threshold_ms=5000, **MIXED)
    _, _, overdue = added(scheduler, request(9, arrived_at=8.0), request(3, arrived_at=9.0), request(9, arrived_at=1.0))
    run_step(scheduler, now=10.0)
    assert overdue.slot is not None


# Whatever arrives and ends


@dataclass
class Account:
    """What one request was given, as the test saw it."""

    request: Request
    eos_after: int | None
    removed: tuple[int, str] | None
    ended: list[str] = field(default_factory=list)
    prompt: int | None = None  # tokens run or held; None: no slot yet
    tokens: int = 0
    first_token_at: int | None = None
    steps_with_slot: int = 0  # without a prompt token


requests = st.fixed_dictionaries(
    {
        "arrives": st.integers(0, 30),
        "length": st.one_of(st.integers(1, 12), st.sampled_from([20, 129, 300])),
        "own": st.sampled_from([0, 0, 1, 2, 5, 20, 200]),
        "most": st.integers(1, 12),
        "eos_after": st.one_of(st.none(), st.integers(1, 12)),
        "all_logits": st.sampled_from([False, False, True]),
        "group": st.integers(0, 4),
        "removed": st.one_of(st.none(), st.tuples(st.integers(0, 40), st.sampled_from(["before", "during", "failed"]))),
    }
)
schedulers = st.fixed_dictionaries(
    {
        "slots": st.sampled_from([1, 2, 3, 8]),
        "max_batch_prefill_tokens": st.sampled_from([None, 1, 2, 5, 40, 300]),
        "max_queue_time": st.sampled_from([math.inf, math.inf, 1e-9, 5.0, 20.0]),
        "waiting_served_ratio": st.sampled_from([0.0, 0.0, 1.5]),
        "max_waiting_tokens": st.integers(0, 5),
    }
)


class Simulation:
    """Runs a scheduler with a schedule of requests, and checks each step against what every request was given before."""

    def __init__(self, schedule, facts, engine):
        self.scheduler = Scheduler(**facts, **engine)
        self.schedule, self.engine, self.supports_chunked_prefill = schedule, engine, engine["supports_chunked_prefill"]
        self.slots, self.max_queue_time = facts["slots"], facts["max_queue_time"]
        self.gate_is_open = self.supports_chunked_prefill or facts["waiting_served_ratio"] == 0
        self.max_waiting_tokens = facts["max_waiting_tokens"]
        self.beside = facts["max_batch_prefill_tokens"] or (BESIDE if self.supports_chunked_prefill else BETWEEN)
        self.alone = max(ALONE if self.supports_chunked_prefill else BETWEEN_MANY, self.beside)
        self.held = [[] for _ in range(self.slots)]  # the KV cache of each slot, as tokens
        self.accounts: list[Account] = []
        self.by_request: dict[Request, Account] = {}
        self.groups = defaultdict(RequestGroup)
        self.tokens_since_decode = self.decodes_since_prompt = 0

    def run(self):
        last = max(each["arrives"] for each in self.schedule)
        now = 0
        while now <= last or any(not account.ended for account in self.accounts):
            assert now < 20_000, "requests are left over"
            self.arrive(now)
            self.remove(now, "before")
            self.expire(now)
            self.step(now)
            now += 1
        assert len(self.accounts) == len(self.schedule)
        assert all(len(account.ended) == 1 for account in self.accounts)
        assert (self.scheduler.busy, len(self.scheduler.waiting)) == (0, 0)
        assert self.scheduler.next(now) is None
        return self.accounts

    def arrive(self, now):
        for each in self.schedule:
            if each["arrives"] == now:
                made = request(
                    each["length"],
                    each["most"],
                    min(each["own"], each["length"]),
                    arrived_at=float(now),
                    group=self.groups[each["group"]],
                    eos_token_ids={EOS},
                    all_logits=each["all_logits"],
                )
                account = Account(made, each["eos_after"], each["removed"])
                self.accounts.append(account)
                self.by_request[made] = account
                self.scheduler.add(made)

    def remove(self, now, phase):
        for account in self.accounts:
            if account.removed == (now, phase):
                if not account.ended:
                    account.ended.append("removed")
                self.scheduler.remove(account.request)

    def expire(self, now):
        live = [account for account in self.accounts if not account.ended]
        begun = {account.request.group for account in self.accounts if account.prompt is not None}
        late = [
            account.request
            for account in live
            if account.request.slot is None
            and now - account.request.arrived_at > self.max_queue_time
            and account.request.group not in begun
        ]
        assert expired(self.scheduler, now) == late
        for each in late:
            self.by_request[each].ended.append("expired")

    def step(self, now):
        step = self.scheduler.next(float(now))
        live = [account for account in self.accounts if not account.ended]
        rows = [account for account in live if account.tokens]
        if step is None:
            assert not live
            return
        for account in live:
            if account.request.slot is not None and account.prompt is None:
                account.prompt = account.request.cached
                assert account.prompt <= max(0, len(account.request.prompt) - 2)
                assert account.prompt == 0 or (self.engine.get("prefix_granularity") and not account.request.all_logits)
        self.check_slots(live, rows)
        self.check_chunks(step, rows)
        self.check_budget(step, live, rows)
        if not self.supports_chunked_prefill:
            self.check_promise(step, live)
        self.remove(now, "during")
        for chunk in step.chunks:
            self.held[chunk.slot] = [*self.held[chunk.slot][: chunk.begin], *chunk.tokens]
        tokens = [self.token(index, step, now) for index in range(len(step.chunks))]
        for index, (reason, each) in enumerate(
            zip(self.scheduler.update(step, [[] if token is None else [token] for token in tokens]), step.requests)
        ):
            self.note(step, index, tokens[index], reason, self.by_request[each], now)
        self.remove(now, "failed")

    def token(self, index, step, now):
        account = self.by_request[step.requests[index]]
        if index not in step.sample_indices or account.removed == (now, "failed"):
            return None
        return EOS if account.tokens + 1 == account.eos_after else OTHER

    def check_slots(self, live, rows):
        """Slots are given first in, first out; none is left free while a request waits."""
        held = [account.request.slot for account in live if account.request.slot is not None]
        assert sorted(set(held)) == sorted(held) and set(held) <= set(range(self.slots)) and len(held) == self.scheduler.busy
        assert [account.request.slot is None for account in live] == sorted(account.request.slot is None for account in live)
        if len(held) < min(self.slots, len(live)):
            assert not self.gate_is_open and rows and self.decodes_since_prompt <= self.max_waiting_tokens

    def check_chunks(self, step, rows):
        """The next tokens of each request, at most one chunk a slot; all rows or none; prompts apart where steps are pure."""
        assert len({chunk.slot for chunk in step.chunks}) == len(step.chunks) == len(step.requests)
        in_rows = []
        for slot, cached, source in step.copies:
            assert self.engine["supports_prefix_copy"] and slot != source
            self.held[slot] = self.held[source][:cached]
        for index, (chunk, each) in enumerate(zip(step.chunks, step.requests)):
            account = self.by_request[each]
            assert chunk.slot == each.slot and not account.ended
            if account.tokens:
                in_rows.append(account)
                assert chunk == Chunk(each.slot, (OTHER,), len(each.prompt) + account.tokens - 1)
                assert index in step.sample_indices
            else:
                end = chunk.begin + len(chunk.tokens)
                assert self.held[chunk.slot][: chunk.begin] == each.prompt[: chunk.begin], "what a slot holds is the prompt's"
                assert chunk.begin == account.prompt and chunk.all_logits == each.all_logits
                assert len(chunk.tokens) > 1 or len(chunk.tokens) == len(each.prompt)
                assert chunk.tokens == each.prompt[chunk.begin : end]
                assert (index in step.sample_indices) == (end == len(each.prompt))
                if self.engine["prefill_chunk"]:
                    assert len(chunk.tokens) <= self.engine["prefill_chunk"]
                if not self.supports_chunked_prefill:
                    assert end in self.cuts(len(each.prompt))
        assert in_rows == [] or {id(account) for account in in_rows} == {id(account) for account in rows}
        assert [account.request.slot for account in in_rows] == sorted(account.request.slot for account in in_rows)
        if self.supports_chunked_prefill:
            assert len(in_rows) == len(rows)
        else:
            assert len(in_rows) == len(step.chunks) or len(step.chunks) == 1

    def cuts(self, length):
        """Where chunks may end, which depends on the prompt's length alone."""
        chunk = self.engine["prefill_chunk"] or length
        cuts = {*range(chunk, length, chunk), length}
        return cuts if length == 1 else {cut - 1 if cut == length - 1 else cut for cut in cuts}

    def check_budget(self, step, live, rows):
        tokens = sum(prompt_tokens(step))
        in_slots = [account for account in live if account.request.slot is not None and not account.tokens]
        if self.supports_chunked_prefill:
            budget = max(2, self.beside if rows else self.alone)
            given = [account for account in in_slots if account.request in step.requests]
            assert tokens <= budget + len(given)
            assert sum(len(chunk.tokens) for chunk in step.chunks if chunk.all_logits) <= KEEP_ALL
            assert not in_slots or self.scheduler.prefilling[0] in step.requests, "the first prompt always runs"
            if not self.engine["prefill_chunk"] and not any(account.request.all_logits for account in in_slots):
                left = sum(len(account.request.prompt) - account.prompt for account in in_slots)
                assert tokens >= min(budget - 1, left), "the budget is used, but for one token that may not run alone"
        elif tokens:
            startable = min(len(live), self.slots) - len(rows)
            fills_slots = startable > len(rows) and not self.engine["prefill_chunk"]
            budget = self.alone if fills_slots else self.beside
            assert not rows or not self.tokens_since_decode or self.tokens_since_decode + tokens <= budget
            self.tokens_since_decode += tokens
        else:
            self.tokens_since_decode = 0
            self.decodes_since_prompt += 1

    def check_promise(self, step, live):
        """A waiting request with a free slot gets prompt tokens within 2 * slots steps where prompts run apart."""
        for account in live:
            if account.request.slot is not None and account.prompt == account.request.cached and not account.tokens:
                account.steps_with_slot += 1
                most = 2 * self.slots
                if account.removed is None or account.removed[1] != "failed":
                    given = account.request in step.requests
                    assert account.steps_with_slot < most or (given and account.steps_with_slot == most)

    def note(self, step, index, token, reason, account, now):
        """Notes what a chunk gave, and that the finish reason is the right one."""
        if account.ended:
            assert reason is None
            return
        if not account.tokens and (token is not None or index not in step.sample_indices):
            account.prompt += len(step.chunks[index].tokens)
        expected = None
        if token is not None:
            account.tokens += 1
            if account.tokens == 1:
                account.first_token_at = now
                self.decodes_since_prompt = 0
            if token == EOS:
                expected = "eos_token"
            elif account.tokens == account.request.max_new_tokens:
                expected = "length"
        assert reason == expected
        if reason:
            account.ended.append(reason)


engines = st.sampled_from(
    [
        MIXED,
        {"supports_chunked_prefill": True, "prefill_chunk": 16},
        {"supports_chunked_prefill": True, "prefill_chunk": 16, "prefix_granularity": 1, "supports_prefix_copy": True},
        {"supports_chunked_prefill": True, "prefill_chunk": None, "prefix_granularity": 1, "supports_prefix_copy": False},
        WHOLE,
        CHUNKED,
        {"supports_chunked_prefill": False, "prefill_chunk": 3},
        {"supports_chunked_prefill": False, "prefill_chunk": 3, "prefix_granularity": 3, "supports_prefix_copy": True},
        {"supports_chunked_prefill": False, "prefill_chunk": 3, "prefix_granularity": 3, "supports_prefix_copy": False},
    ]
)


@given(st.lists(requests, min_size=1, max_size=14), schedulers, engines)
def test_every_request_gets_its_slot_its_tokens_and_one_end_within_the_budgets(schedule, facts, engine):
    Simulation(schedule, facts, engine).run()


alike = st.fixed_dictionaries(
    {
        "arrives": st.integers(0, 3),
        "length": st.sampled_from([1, 20, 60]),
        "most": st.sampled_from([1, 30]),
        "own": st.just(60),  # nothing in common: what is held is not run again
        "eos_after": st.none(),
        "all_logits": st.just(False),
        "group": st.just(0),
        "removed": st.none(),
    }
)


@given(st.lists(alike, min_size=3, max_size=9), st.sampled_from([1, 3, 5, 7, 300]), engines)
def test_prompts_of_the_same_length_get_their_first_tokens_in_the_order_of_arrival(schedule, budget, engine):
    facts = {"slots": 8, "max_batch_prefill_tokens": budget, "max_queue_time": math.inf}
    accounts = Simulation(schedule, facts | {"waiting_served_ratio": 0.0, "max_waiting_tokens": 0}, engine).run()
    for length in (1, 20, 60):
        firsts = [account.first_token_at for account in accounts if len(account.request.prompt) == length]
        assert firsts == sorted(firsts)
