"""Models whose layers have recurrent states: a request gets its own text whatever ran in its slot before, and a conversation
goes on from snapshots at the borders of its messages."""

from random import Random

import pytest
from fakes.model import FakeModel, greedy
from loop import Driven, NoMetrics, Oracle
from msgspec.structs import replace

import worker
from models.states import ZERO, Run, States
from protocol import Cancel, Generate, Image

SYSTEM = list(range(1, 20))


def model(snapshots=8, **options):
    facts = {"supports_chunked_prefill": True, "prefix_granularity": 1, "supports_prefix_copy": True, "max_total_tokens": 400}
    return FakeModel(snapshots=snapshots, **(facts | options))


def turns(chance, number):
    """The prompts of a conversation, with the borders of their messages: the thinking of a turn is not in the next one."""
    text = list(SYSTEM)
    first = len(text)
    for _ in range(number):
        before = len(text)
        text += chance.choices(range(20, 50), k=chance.randint(2, 9))
        yield [*text, 1, 2, 3], [first, before, len(text)]
        text += [1, *chance.choices(range(20, 50), k=chance.randint(2, 9))]  # not as it was generated


def test_a_turn_runs_what_is_new_and_a_conversation_beside_it_takes_only_the_common_system_prompt():
    driven = Driven(served=model(), metrics=NoMetrics())
    for other in range(2):
        chance, ran = Random(other), []
        for number, (prompt, borders) in enumerate(turns(chance, 6)):
            driven.arrive(Generate(10 * other + number, prompt, 4, borders=borders))
            driven.run()
            ran.append(driven.prompts[10 * other + number].cached)
            assert driven.tokens[10 * other + number] == greedy(prompt, 4)
        borders = [of_turn for _prompt, of_turn in turns(Random(other), 6)]
        assert ran == [len(SYSTEM) * other, *(last for _first, _newest, last in borders[:-1])]


def test_without_room_for_snapshots_every_prompt_runs_whole():
    driven = Driven(served=model(snapshots=0), metrics=NoMetrics())
    for number, (prompt, borders) in enumerate(turns(Random(0), 3)):
        driven.arrive(Generate(number, prompt, 4, borders=borders))
        driven.run()
        assert (driven.prompts[number].cached, driven.tokens[number]) == (0, greedy(prompt, 4))


def test_a_prompt_without_messages_is_kept_at_intervals_which_give_way_to_borders():
    served = model(snapshots=2, max_total_tokens=10_000, batch_size=1)
    driven = Driven(served=served, metrics=NoMetrics())
    text = Random(0).choices(range(1, 50), k=5000)
    driven.arrive(Generate(1, text, 1))
    driven.run(at_most=5000)
    driven.arrive(Generate(2, [*text[:4500], 7, 7, 7], 1))
    driven.run(at_most=5000)
    assert driven.prompts[2].cached == 4096
    driven.arrive(Generate(3, text[:50], 1, borders=[10, 40]), Generate(4, text[:3000], 1))
    driven.run(at_most=5000)
    driven.arrive(Generate(5, text[:60], 1))
    driven.run()
    assert driven.prompts[5].cached == 40


def test_a_snapshot_may_be_right_before_an_image_and_in_tiles_within_one():
    """The border behind an image of a short question, in whole tiles, is often within the image."""
    prompt = [*SYSTEM, *Image(7, 30, (1, 1, 1), b"").ids, 2, 3, 4]
    for granularity, borders in ((1, [len(SYSTEM), len(prompt) - 2]), (16, [len(SYSTEM) // 16 * 16, len(prompt) // 16 * 16])):
        served = model(batch_size=1, prefix_granularity=granularity)
        driven = Driven(served=served, metrics=NoMetrics())
        driven.arrive(Generate(1, prompt, 1, borders=[len(SYSTEM), len(prompt) - 2]))
        driven.run()
        assert served.states.reusable(0, borders[1] - 1) == borders[0]
        assert served.states.reusable(0, len(prompt)) == borders[1]


def test_a_state_that_a_failed_call_has_changed_is_not_gone_on_from():
    served = model()
    driven = Driven(served=served, metrics=NoMetrics())
    ((prompt, borders),) = turns(Random(0), 1)
    driven.arrive(Generate(1, prompt, 9, borders=borders, ignore_eos=True))
    driven.step(3)
    served.states.begin(0, len(prompt) + len(driven.tokens[1]) - 1, 1)  # as a call that raises in its middle
    driven.run()
    assert driven.ends[1] == "failed"
    driven.arrive(Generate(2, prompt, 9, borders=borders))
    driven.run()
    assert driven.tokens[2] == greedy(prompt, 9) and driven.prompts[2].cached == borders[-1]


@pytest.mark.parametrize("seed", range(300))
def test_random_schedules_generate_what_each_request_generates_alone(seed, monkeypatch):
    chance = Random(seed)
    served = model(
        snapshots=chance.choice([0, 1, 2, 5, 20]),
        batch_size=chance.randint(1, 4),
        prefix_slots=chance.choice([0, 6]),
        prefix_granularity=chance.choice([1, 1, 4]),
        prefill_chunk=chance.choice([None, 8]),
        adapters=["a"],
        verify_length=chance.choice([0, 4]),
    )
    requests = []
    for number in range(chance.randint(2, 6)):
        adapter = chance.choice(["", "", "a"])
        for turn, (prompt, borders) in enumerate(turns(Random(chance.randrange(4)), chance.randint(1, 5))):
            prompt = prompt[: chance.choice([1, 2, 21, len(prompt), len(prompt), len(prompt)])]
            made = Generate(100 * number + turn, prompt, chance.randint(1, 8), adapter=adapter)
            requests.append(replace(made, borders=borders, prompt_logprobs=chance.random() < 0.1))
    chance.shuffle(requests)
    alone = {each.id: greedy(each.prompt, each.max_new_tokens, adapter=int(each.adapter == "a")) for each in requests}
    arriving = list(requests)
    proposed = iter(requests)
    monkeypatch.setattr(worker, "NgramProposer", lambda *_: Oracle(alone[next(proposed).id], chance))
    driven = Driven(served=served, metrics=NoMetrics())
    while arriving:
        for _ in range(min(len(arriving), chance.choice([0, 0, 1, 3]))):
            driven.arrive(arriving.pop(0))
        if chance.random() < 0.2:
            driven.arrive(Cancel(chance.choice(requests).id, "test"))
        driven.arrive(Cancel(10**9, "keeps the loop from waiting"))
        driven.step()
        assert served.blocks[ZERO] == ()
        assert driven.worker.load()["state_snapshots"] == served.states.kept <= served.states.snapshots
    driven.run()
    for request in requests:
        wanted = alone[request.id]
        found = driven.tokens[request.id]
        assert found == wanted[: len(found)], request
        assert driven.ends[request.id] == "cancelled" or found == wanted, request


def test_a_slot_goes_on_only_from_where_it_is():
    states = States(slots=1, snapshots=1)
    states.end([states.begin(0, 0, 5)], {0: "border"})
    with pytest.raises(ValueError, match="slot 0 has no state at position 3"):
        states.begin(0, 3, 1)
    assert states.begin(0, 5, 1) == Run(0, position=5, tokens=1, read=1, writes=[2])
    assert (states.reusable(0, 9), states.reusable(0, 4)) == (5, 0)


def test_the_state_after_the_last_accepted_draft_token_goes_on_and_the_blocks_of_the_others_are_free():
    states = States(slots=2, snapshots=0, draft_tokens=3)
    states.end([states.begin(slot, 0, 9) for slot in (0, 1)], {})
    for _ in range(9):
        states.accept({0: 9, 1: 9})
        run = states.begin(0, 9, 4, are_drafts=True)
        states.end([run], {})
        states.accept({0: 11, 1: 9})
        assert states.begin(0, 11, 1).read == run.writes[1]
        assert states.begin(1, 9, 1).read == 2
        states.end([states.begin(slot, 0, 9) for slot in (0, 1)], {})
    assert len(states.unused) == 3


def test_in_place_a_slot_always_writes_its_block_and_goes_on_from_the_copy():
    states = States(slots=2, snapshots=1, in_place=True)
    assert states.end([states.begin(1, 0, 5)], {1: "border"}) == {1: 3}
    run = states.begin(1, 5, 2)
    assert run == Run(1, position=5, tokens=2, read=2, writes=[2])
    assert (states.end([run], {}), states.position(1)) == ({}, 7)
    states.resume(1, 1, states.reusable(1, 6))
    assert (states.position(1), states.begin(1, 5, 2)) == (5, Run(1, position=5, tokens=2, read=3, writes=[2]))
