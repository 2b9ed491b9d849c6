"""The simulation of replicas agrees with what queueing theory knows exactly, and with the table in docs/operations.md."""

import re
import statistics
import sys

import pytest

from run import HERE

sys.path.insert(0, str(HERE / "bench"))

from load import LoadError
from replicas import INSTANCE, MODEL, TOKENS, Times, published, report_costs, report_simulation, simulate

OPERATIONS = (HERE / "docs" / "operations.md").read_text()
ONE_SLOT = Times(slots=1, prompt_s=0.1, step_s=0.1)
EIGHT_SLOTS = Times(slots=8, prompt_s=0.02, step_s=0.01)


def test_requests_wait_for_one_slot_as_in_a_queue_with_one_server():
    """M/M/1: with half of the load that is possible a request waits as long as it then takes, on average."""
    service_s = 1 / ONE_SLOT.requests_per_s(50)
    outcome = simulate(ONE_SLOT, 1, 0.5 / service_s, "least", seconds=60_000, tokens=50)
    assert statistics.mean(outcome.ttft_s) - ONE_SLOT.prompt_s == pytest.approx(service_s, rel=0.1)


def test_a_random_choice_gives_each_replica_the_queue_of_one_alone():
    service_s = 1 / ONE_SLOT.requests_per_s(50)
    outcome = simulate(ONE_SLOT, 10, 10 * 0.5 / service_s, "random", seconds=6_000, tokens=50)
    assert statistics.mean(outcome.ttft_s) - ONE_SLOT.prompt_s == pytest.approx(service_s, rel=0.1)


@pytest.mark.parametrize("balance", ["least", "random"])
def test_full_replicas_make_the_tokens_that_their_times_allow(balance):
    most = EIGHT_SLOTS.requests_per_s(50)
    outcome = simulate(EIGHT_SLOTS, 3, 3 * 1.5 * most, balance, seconds=60, tokens=50)
    assert outcome.tokens_per_s == pytest.approx(3 * most * 50, rel=0.03)


def test_without_a_queue_the_first_token_takes_the_prompt_and_the_step_before_it():
    outcome = simulate(EIGHT_SLOTS, 20, 1.0, "least", seconds=300, tokens=50)
    assert min(outcome.ttft_s) == pytest.approx(EIGHT_SLOTS.prompt_s)
    assert max(outcome.ttft_s) <= 2 * EIGHT_SLOTS.prompt_s + EIGHT_SLOTS.step_s


def test_fewest_requests_keep_a_free_slot_where_a_random_choice_does_not():
    rate = 10 * 0.8 * EIGHT_SLOTS.requests_per_s(50)
    least, anywhere = (simulate(EIGHT_SLOTS, 10, rate, balance, seconds=60, tokens=50) for balance in ("least", "random"))
    assert max(least.ttft_s) < max(anywhere.ttft_s) / 3


def test_a_model_without_published_times_is_named():
    with pytest.raises(LoadError, match="no figures of Llama-9 on trn1"):
        published("Llama-9", "trn1.32xlarge")


def test_the_tables_of_the_document_are_what_the_simulation_and_the_published_figures_say():
    times, _figure = published(MODEL, INSTANCE)
    most = times.requests_per_s(TOKENS)
    assert f"{most:.2f} requests/s or {most * TOKENS:.0f} tokens/s" in OPERATIONS
    assert f"prompts of 128 tokens {times.prompt_s * 1e3:g} ms, steps {times.step_s * 1e3:g} ms" in re.sub(
        r"\s+", " ", OPERATIONS
    )
    rows = [row for row in report_simulation(MODEL, INSTANCE, [2, 4], 0.8) if re.match(r"\| \d", row)]
    rows += report_costs()
    assert len(rows) > 10 and [row for row in rows if row not in OPERATIONS] == []
