"""Rows with a grammar in the worker's loop: what they generate, when they end, and that others notice nothing."""

import json
import re
import threading
from functools import cache
from random import Random

import jsonschema
import numpy as np
import pytest
from adapter_schedules import check_schedule, vocabulary
from fakes.model import EOS, FakeModel, greedy
from hypothesis import settings
from llguidance import LLMatcher, LLParserLimits
from loop import REUSES, Driven, NoMetrics, Oracle, on_every_engine
from processes import wait_until
from tiny_tokenizers import byte_level

import worker
from engine.step import masks_of
from protocol import MAX_GRAMMAR, Cancel, Generate, SamplingParams
from text import grammar
from text.grammar import Grammars, Matcher, of_json_schema, of_regex

PHONE = "[0-9]{3}-[a-z]{2}"
WORDS = "[a-z]{1,30}"
EXAMPLES = settings.default.max_examples
SCHEMAS = 5 * EXAMPLES  # they run beside each other
SCHEDULES = EXAMPLES // 2  # each runs up to twelve requests twice


@cache
def tokenizer():
    return byte_level()


def guided(**options):
    """A worker whose tokens are pieces of text, with compiled grammars."""
    return Driven(grammars=vocabulary()[1], vocab_size=tokenizer().get_vocab_size(), max_total_tokens=80, **options)


def text_of(driven, request_id):
    return tokenizer().decode([token for token in driven.tokens[request_id] if token != EOS])


@on_every_engine
def test_guided_rows_follow_their_grammar_and_free_ones_beside_them_generate_what_they_do_alone(engine):
    driven = guided(**engine)
    warm = [SamplingParams(seed=seed, temperature=1.5, top_k=5 * (seed % 3)) for seed in range(4)]
    driven.arrive(*(Generate(n, [10 + n], 40, sampling=each, grammar=of_regex(PHONE)) for n, each in enumerate(warm)))
    driven.arrive(Generate(10, [20, 21], 30), Generate(11, [22] * 9, 30))
    driven.run()
    for n in range(4):
        assert re.fullmatch(PHONE, text_of(driven, n)), text_of(driven, n)
    assert {n: driven.ends[n] for n in range(4)} == dict.fromkeys(range(4), "eos_token")
    size = tokenizer().get_vocab_size()
    assert driven.tokens[10] == greedy([20, 21], 30, size) and driven.tokens[11] == greedy([22] * 9, 30, size)


@on_every_engine
@pytest.mark.parametrize("seed", range(10))
def test_a_guided_text_is_the_same_with_guesses_and_ends_where_it_is_complete(engine, seed):
    chance = Random(seed)
    grammars = [of_regex(PHONE), of_regex(WORDS), ""]
    requests = [
        Generate(n, [10 + n, seed + 1], 30, sampling=SamplingParams(seed=n, temperature=1.5), grammar=chance.choice(grammars))
        for n in range(5)
    ]
    plain, guessed = guided(metrics=NoMetrics(), **engine), guided(verify_length=6, **engine)
    plain.arrive(*requests)
    plain.run()
    texts = dict(plain.tokens)
    waiting = iter(requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "NgramProposer", lambda *_: Oracle(texts[next(waiting).id], chance))
        guessed.arrive(*requests)
        guessed.run()
    assert (guessed.tokens, guessed.ends) == (texts, plain.ends)
    assert guessed.worker.metrics.series("speculation_draft_tokens")._value.get() > 0


@on_every_engine
def test_a_guided_text_does_not_depend_on_its_company(engine):
    request = Generate(1, [7, 8, 9], 40, sampling=SamplingParams(seed=3, top_p=0.9), grammar=of_regex(WORDS))
    alone, together = guided(**engine), guided(**engine)
    alone.arrive(request)
    alone.run()
    together.arrive(Generate(2, [5] * 7, 30, grammar=of_regex(PHONE)), request, Generate(3, [6], 30))
    together.run()
    assert alone.tokens[1] == together.tokens[1]


@on_every_engine
@pytest.mark.parametrize("seed", range(5))
def test_a_request_that_fails_changes_no_other_text_of_its_grammar(engine, seed, monkeypatch):
    """Lexers with few states: some texts fail, and which ones depends on these texts alone."""
    monkeypatch.setattr(grammar, "LIMITS", LLParserLimits(max_lexer_states=60))
    chance = Random(seed)
    requests = [
        Generate(
            n,
            [10 + n],
            chance.randint(1, 40),
            sampling=SamplingParams(seed=n, temperature=2),
            grammar=of_regex("[a-zA-Z]{1,200}"),
        )
        for n in range(8)
    ]
    together = guided(**engine)
    together.arrive(*requests)
    together.run()
    for request in requests:
        alone = guided(metrics=NoMetrics(), **engine)
        alone.arrive(request)
        alone.run()
        assert (alone.tokens[request.id], alone.ends) == (together.tokens[request.id], {request.id: together.ends[request.id]})
    assert {"failed", "length"} <= set(together.ends.values())


@pytest.mark.parametrize("keep_eos, after", [(False, []), (True, [EOS])])
def test_a_complete_text_ends_at_once_or_with_an_eos_token_where_tokens_are_shown(keep_eos, after):
    driven = guided()
    driven.arrive(Generate(1, [3], 40, grammar=of_regex(PHONE), keep_eos=keep_eos, min_new_tokens=40))
    driven.run()
    assert re.fullmatch(PHONE, text_of(driven, 1))
    assert [token for token in driven.tokens[1] if token == EOS] == after and driven.ends[1] == "eos_token"


def test_a_limit_ends_an_incomplete_text():
    driven = guided()
    driven.arrive(Generate(1, [3], 2, grammar=of_regex(PHONE)))
    driven.run()
    assert driven.ends[1] == "length" and len(driven.tokens[1]) == 2


def test_masks_are_computed_while_the_device_runs(monkeypatch):
    driven, filled, mask = guided(), threading.Event(), Matcher.mask

    def mask_and_signal(matcher):
        made = mask(matcher)
        filled.set()
        return made

    monkeypatch.setattr(Matcher, "mask", mask_and_signal)

    def step_that_ends_after_the_mask(chunks):
        assert filled.wait(60)
        filled.clear()

    driven.each_call(step_that_ends_after_the_mask)
    driven.arrive(Generate(1, [3], 40, grammar=of_regex(PHONE)))
    driven.run()
    assert re.fullmatch(PHONE, text_of(driven, 1))


def test_a_grammar_is_compiled_while_other_requests_run_and_then_its_request_takes_a_slot():
    driven = guided()
    schema = of_json_schema({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    driven.arrive(Generate(1, [3], 40, grammar=schema), Generate(2, [4], 5))
    driven.step()
    assert driven.running == [2]
    wait_until(lambda: driven.wire.arrivals, "the compiled grammar")
    driven.run()
    assert '"a"' in text_of(driven, 1) and driven.ends == {1: "eos_token", 2: driven.ends[2]}
    assert driven.worker.metrics.series("grammar_compile_duration").collect()[0].samples


def test_a_request_that_is_cancelled_while_its_grammar_is_compiled_takes_no_slot():
    driven = guided()
    driven.arrive(Generate(1, [3], 40, grammar=of_regex("a{3}")))
    driven.step()
    wait_until(lambda: driven.wire.arrivals, "the compiled grammar")
    compiled, driven.wire.arrivals = driven.wire.arrivals, []
    driven.arrive(Cancel(1, "client disconnected"))
    driven.step()
    driven.wire.arrivals += compiled
    driven.run()
    assert driven.ends == {1: "cancelled"} and not driven.model.calls


def test_the_grammars_of_cancelled_requests_are_not_compiled_before_those_that_others_wait_for(monkeypatch):
    driven, go_on, compiled, matcher = guided(), threading.Event(), [], Grammars.matcher

    def wait_and_compile(grammars, text):
        assert go_on.wait(60)
        compiled.append(text)
        return matcher(grammars, text)

    monkeypatch.setattr(Grammars, "matcher", wait_and_compile)
    texts = [of_regex(f"a{{{n}}}") for n in range(1, 9)]
    driven.arrive(*(Generate(n, [3], 40, grammar=text) for n, text in enumerate(texts)))
    driven.worker.receive()
    driven.arrive(*(Cancel(n, "client disconnected") for n in range(1, 7)))
    driven.worker.receive()
    go_on.set()
    wait_until(lambda: len(driven.wire.arrivals) >= 2, "the compiled grammars")
    driven.run()
    assert compiled == [texts[0], texts[7]] and driven.ends[7] == "eos_token"


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone_with_the_reason():
    driven = guided()
    driven.arrive(Generate(1, [3], 40, grammar=of_regex("a(")), Generate(2, [4], 5))
    driven.step()
    wait_until(lambda: driven.wire.arrivals, "the failed grammar")
    driven.run()
    assert driven.ends[1] == "failed" and len(driven.tokens[2]) == len(greedy([4], 5, tokenizer().get_vocab_size()))
    assert "the grammar cannot be used: unclosed group" in [
        getattr(message, "message", "") for _peer, message in driven.wire.sent
    ]


def test_a_row_whose_masks_take_too_long_ends_alone(monkeypatch):
    driven = guided()
    driven.arrive(Generate(1, [3], 40, grammar=of_regex(WORDS)), Generate(2, [4], 9))
    monkeypatch.setattr(grammar, "SLOW_MASK_S", -1)
    driven.run()
    assert driven.ends[1] == "failed" and driven.tokens[2] == greedy([4], 9, tokenizer().get_vocab_size())


def random_schema(random, depth=0):
    """A JSON schema as programs write them: objects, lists, enumerations, bounds, alternatives."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    kind = random.choice(kinds + ["object", "array", "anyOf"] * (4 if depth < 2 else 0))
    inner = lambda: random_schema(random, depth + 1)  # noqa: E731
    if kind == "object":
        names = random.sample(["name", "age", "kind", "is_ok", "Größe", "a b", 'q"'], random.randint(0, 4))
        required = [name for name in names if random.random() < 0.6]
        return {"type": "object", "properties": {name: inner() for name in names}, "required": required}
    least, most = sorted(random.choices(range(-20, 200), k=2))
    short = {"maxLength": random.randint(0, 12)}
    return {
        "array": lambda: {
            "type": "array",
            "items": inner(),
            "minItems": random.randint(0, 2),
            "maxItems": random.randint(2, 4),
        },
        "anyOf": lambda: {"anyOf": [inner(), inner()]},
        "string": lambda: {"type": "string", **short},
        "integer": lambda: {"type": "integer", "minimum": least, "maximum": most},
        "number": lambda: {"type": "number", "minimum": least, "exclusiveMaximum": most + 1},
        "enum": lambda: {"enum": random.sample(["red", "green", 3, None, True, "été", [1, "x"], {"a": 1}], 3)},
        "const": lambda: {"const": random.choice(["x", 17, None, ["a"]])},
        "pattern": lambda: {
            "type": "string",
            "pattern": random.choice(["^[A-Z]{2}[0-9]{3}$", "^(foo|bar)+$"]),
            "maxLength": 12,
        },
        "format": lambda: {"type": "string", "format": random.choice(["date", "uuid", "ipv4", "int64"]), "maxLength": 40},
    }.get(kind, lambda: {"type": kind})()


@pytest.mark.parametrize("engine", REUSES.values(), ids=REUSES)
def test_in_any_schedule_a_request_with_an_adapter_generates_what_it_generates_alone(engine):
    """With grammars and draft tokens, in mixed batches with others."""
    counts = []
    for seed in range(SCHEDULES):
        size, _grammars = vocabulary()
        names = ["a", "b", "c"]
        model = FakeModel(vocab_size=size, adapters=names, max_total_tokens=50, prefix_slots=5, verify_length=4, **engine)
        counts.append(check_schedule(model, seed, max_batch_prefill_tokens=Random(seed).choice([None, 5])))
    accepted, held, finished = np.mean(counts, axis=0)
    assert min(accepted, finished) > 2 and held > 1


@pytest.mark.random_examples
def test_hundreds_of_schemas_give_valid_json_whatever_the_model_prefers():
    random = Random(7)
    driven = Driven(
        grammars=vocabulary()[1],
        vocab_size=tokenizer().get_vocab_size(),
        max_total_tokens=500,
        batch_size=8,
        supports_chunked_prefill=True,
    )
    schemas = {n: random_schema(random) for n in range(SCHEMAS)}
    for n, schema in schemas.items():
        warm = SamplingParams(seed=n, temperature=1.5) if n % 2 else SamplingParams()
        driven.arrive(Generate(n, [n % 300 + 1], 480, sampling=warm, grammar=of_json_schema(schema), logprobs=False))
        if n % 50 == 49:
            driven.run(at_most=10_000)
    complete = [n for n, reason in driven.ends.items() if reason == "eos_token"]
    for n in complete:
        jsonschema.validate(json.loads(text_of(driven, n)), schemas[n])
    assert len(complete) >= 0.9 * SCHEMAS and set(driven.ends.values()) <= {"eos_token", "length"}


def test_a_grammar_of_as_many_rules_as_fit_does_not_end_the_worker():
    rules = MAX_GRAMMAR // 12
    text = "start: a0\n" + "".join(f"a{n:x}: a{n + 1:x}\n" for n in range(rules)) + f'a{rules:x}: "x"'
    driven = guided()
    driven.arrive(Generate(1, [1], 5, grammar=LLMatcher.grammar_from_lark(text)))
    driven.worker.receive()
    wait_until(lambda: driven.wire.arrivals, "the grammar is compiled")
    driven.arrive(Generate(2, [2], 5))
    driven.run()
    assert set(driven.ends) == {1, 2}


def test_a_grammar_that_was_compiled_for_a_request_that_is_over_is_not_given_to_the_next_one_with_its_id():
    driven = guided()
    driven.arrive(Generate(1, [1], 5, grammar=of_regex("[0-9]{7}")))
    driven.worker.receive()
    wait_until(lambda: driven.wire.arrivals, "the grammar is compiled")
    driven.arrive(Cancel(1, "over"), Generate(1, [1], 5))
    driven.run()
    assert driven.tokens[1] == greedy([1], 5, tokenizer().get_vocab_size())


class Broken:
    """A matcher whose mask cannot be computed."""

    def mask(self):
        raise RuntimeError("on purpose")


def test_a_mask_that_cannot_be_computed_is_the_error_of_its_row_alone():
    found = masks_of([None, Broken()], 40)
    assert list(found.errors) == [1] and (found.mask == 0xFFFFFFFF).all() and found.mask.shape == (2, 2)
