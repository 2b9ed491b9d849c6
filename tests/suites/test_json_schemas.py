"""Two suites of JSON schemas, walked token by token through the grammars that the server makes of them.

JSONSCHEMABENCH and JSON_SCHEMA_TEST_SUITE are checkouts of guidance-ai/jsonschemabench and of
json-schema-org/JSON-Schema-Test-Suite.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest
from published.weights import Published
from tokenizers import Tokenizer

from text.grammar import GrammarChecker, GrammarError, Grammars, of_json_schema
from text.json_schema import enforceable

EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text())
EOS = [2]


class Result(NamedTuple):
    """Of one schema: whether it is accepted, the keywords that are left out, and its tests that went wrong."""

    name: str
    is_accepted: bool
    left_out: list[str]
    refused: int = 0  # valid instances
    allowed: int = 0  # invalid ones

    @property
    def passes(self) -> bool:
        return self.is_accepted and not self.refused and not self.allowed


class Judge:
    """Which texts the grammar of a schema allows, with SmolLM2's tokenizer."""

    def __init__(self):
        folder = Published.of("smollm2").folder
        self.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        vocab_size = self.tokenizer.get_vocab_size()
        self.checker = GrammarChecker(folder, vocab_size, EOS)
        self.grammars = Grammars(folder, vocab_size, EOS)

    def result(self, name, schema, tests):
        try:
            grammar = of_json_schema(schema)
            self.checker.check(grammar)
        except GrammarError:
            return Result(name, False, [])
        wrong = [valid for data, valid in tests if self.allows(grammar, json.dumps(data, ensure_ascii=False)) != valid]
        return Result(name, True, enforceable(schema)[1], wrong.count(True), wrong.count(False))

    def allows(self, grammar, text):
        matcher = self.grammars.matcher(grammar)
        try:
            for token_id in self.tokenizer.encode(text, add_special_tokens=False).ids:
                if not matcher.mask()[token_id >> 3] >> (token_id & 7) & 1:
                    return False
                matcher.consume(token_id)
            return matcher._matcher.is_accepting()
        except GrammarError:
            return False


@pytest.fixture(scope="module")
def judge():
    return Judge()


def checkout(variable):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no checkout")
    return Path(os.environ[variable])


def unexplained(results):
    """Schemas that allow what is invalid, although no keyword was left out."""
    return [each.name for each in results if each.allowed and not each.left_out]


def test_jsonschemabench(judge, capsys):
    """Ten minutes."""
    results = []
    for path in sorted((checkout("JSONSCHEMABENCH") / "maskbench" / "data").glob("*.json")):
        case = json.loads(path.read_text())
        tests = [(test["data"], test["valid"]) for test in case.get("tests", ())]
        results.append(judge.result(path.stem, case["schema"], tests))
    accepted = sum(each.is_accepted for each in results) / len(results)
    passing = sum(each.passes for each in results) / len(results)
    with capsys.disabled():
        print(f"\nJSONSchemaBench: {len(results)} schemas, {accepted:.1%} accepted, {passing:.1%} pass all of their tests")
    expected = EXPECTED["json_schema_bench"]
    assert accepted >= expected["least_accepted"] and passing >= expected["least_passing"]
    assert not unexplained(results)


def test_json_schema_test_suite(judge, capsys):
    results = []
    for path in sorted((checkout("JSON_SCHEMA_TEST_SUITE") / "tests" / "draft2020-12").glob("*.json")):
        for group in json.loads(path.read_text()):
            tests = [(test["data"], test["valid"]) for test in group["tests"]]
            name = f"{path.stem}: {group['description']}"
            if isinstance(group["schema"], dict):
                results.append(judge.result(name, group["schema"], tests))
    accepted = [each for each in results if each.is_accepted]
    passing = sum(each.passes for each in accepted)
    with capsys.disabled():
        print(f"\nJSON-Schema-Test-Suite: {len(results)} groups, {len(accepted)} accepted, {passing} pass all of their tests")
    assert not unexplained(results)
