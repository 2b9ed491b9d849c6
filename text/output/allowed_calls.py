"""The calls of tools that an output may have, and the grammars that enforce them."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from text.grammar import GrammarError, json_rule, of_rules
from text.json_schema import pointer
from text.output.call_mender import ERRORS, CallText
from text.output.call_syntaxes import CONSTRAINTS, Function, TokenId, ToolFormat, terminals, up_to
from text.template import ANY_IDS, CallIds

MOST_CALLS = (
    16  # side by side that are asked for: small models would repeat theirs up to the end of the context
)


@dataclass(frozen=True)
class ModelTools:
    """The tool support of the served model's chat template, detected when it is loaded."""

    format: ToolFormat | None  # None: unknown
    token_id: TokenId = lambda _text: None
    parallel: bool = True  # calls in one message
    call_ids: CallIds = ANY_IDS
    in_prompt: bool = False  # the template has no place for tools, so the system message describes them


@dataclass(frozen=True)
class AllowedCalls:
    """The calls that an output may have: of `functions`, more than one if `parallel`."""

    model: ModelTools
    functions: Sequence[Function]
    mode: str  # auto, required or named
    parallel: bool
    may_repeat: bool = False  # a call that equals an earlier one of the output

    @property
    def format(self) -> ToolFormat:
        assert self.model.format is not None, "calls in an unknown format are rejected"
        return self.model.format

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions]

    @property
    def is_named(self) -> bool:
        return self.mode == "named"

    @property
    def requires_call(self) -> bool:
        return self.mode != "auto"


class ParametersError(GrammarError):
    """The parameters of the function of this name cannot be enforced; the message is for the client."""

    def __init__(self, function: str, message: str):
        super().__init__(message)
        self.function = function


def calls_grammar(calls: AllowedCalls, start: str, body: str = "") -> str:
    """The grammar `start`, made of the rules `calls`, `auto` (text with calls or without) and `body`, another
    grammar.

    Raises GrammarError, which is a ParametersError where one function is the reason.
    """
    form = calls.format
    token_id = calls.model.token_id
    lark = functools.partial(terminals, markers=form.markers, token_id=token_id)
    outer = [
        f"start: {start}",
        f"calls: {form.before} listed {form.after}",
        f"listed: call ({form.between} call){{0,{MOST_CALLS - 1}}}" if calls.parallel else "listed: call",
    ]
    if form.auto:
        outer.append(f"auto: {form.auto}")
    elif form.implicit_start:  # what a text begins with decides
        outer.append("auto: TEXT? | calls")
    else:
        outer.append(f"auto: (head {form.marked}){'*' if calls.parallel else '?'} TEXT")
    rules = [
        re.sub(r'"(?:[^"\\]|\\.)+"', lambda quoted: f"({lark(json.loads(quoted[0]))})", rule)
        for rule in outer
    ]
    rules.append("call: " + " | ".join(f"call{n}" for n in range(len(calls.functions))))
    rules.append(r"ws: /\n? ?/")
    for name, marker in (("open", form.open), ("close", form.close), ("next", form.next)):
        if marker:
            rules.append(f"{name}: {lark(marker)}")
    if form.implicit_start:
        rules.append(rf"TEXT: /\s*[^\{form.implicit_start}\s](.|\n)*/")
    else:
        rules += up_to(form.open, token_id)
    for n, function in enumerate(calls.functions):
        if start == "auto" and not function.is_strict:
            function = Function(function.name, {"type": "object"})
        try:
            # Templates write calls in one line, so models do, too. A schema that cannot be enforced is
            # rejected in every syntax.
            arguments = json_rule({"type": "object"} | function.parameters, " ?", function.is_strict)
            rules += form.call_rules(f"call{n}", function, arguments, lark)
        except GrammarError as error:
            raise ParametersError(function.name, f"of {function.name} {error}") from None
    rules += form.shared_rules(lark, token_id)
    return of_rules(rules, body, "body")


def not_written(form: ToolFormat, function: Function) -> Iterator[str]:
    """What the grammar of a call leaves out of the function's schema because the format does not write
    arguments as JSON: JSON pointers."""
    if form.writes_json:
        return
    parameters = function.parameters
    enforced = {"type", "properties"}
    required = parameters.get("required")
    if not isinstance(required, list) or all(name in [*function.properties] for name in required):
        enforced.add("required")
    if function.properties or not isinstance(parameters.get("additionalProperties"), dict):
        enforced.add("additionalProperties")
    yield from _constraints(parameters, enforced, "")
    for name, schema in function.properties.items():
        enforced = form.enforced(schema, parameters)
        yield from _constraints(schema, enforced, pointer((((), "properties"), name)))


def _constraints(schema: Any, enforced: set[str], place: str) -> Iterator[str]:
    for name in schema if isinstance(schema, dict) else ():
        if name in CONSTRAINTS - enforced:
            yield f"{place}/{name}"


def mended_calls(
    text: str, calls: AllowedCalls, rest: str | None = "", is_final: bool = True, is_exact: bool = False
) -> list[tuple[str, str]] | None:
    """The names and the arguments, in JSON, of the calls that are all of the text but for markers and
    comments; None: it has something else.

    rest: what follows the text; None: it is truncated, and the last call has the arguments that are complete.
    is_final: `rest` is all that follows; if it is not, a value that may go on there is none. is_exact: calls
    of other formats are none.
    """
    form = calls.format
    schemas = {function.name: function.parameters for function in calls.functions}
    inner = () if form.call_end else form.inner
    markers = (form.open, *form.also_open, form.close, *inner)
    whole = CallText(text, schemas, markers, not form.is_whole, rest, is_final)
    own = functools.partial(form.calls_in, whole)
    others = [whole.in_json, whole.in_python, functools.partial(form.after_names, whole)]
    for read in [own] if is_exact else [own, *others]:
        with contextlib.suppress(*ERRORS):
            return [whole.checked(*call) for call in read(whole.skipped(0))]
    return None
