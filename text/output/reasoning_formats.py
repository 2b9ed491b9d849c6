"""How models write their reasoning: one row a format, its detection in the chat template, and its grammar.

An output may begin with reasoning, between two markers; the opening one may stand at the end of the prompt.
`OutputParser` (output/parser.py) separates it from the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from text.grammar import of_rules
from text.output.call_syntaxes import TokenId, terminals, up_to
from text.template import ChatTemplate
from text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning.

    inner: the special tokens that `open` is made of, if there are several. headers, answer: for models whose
    output is several messages, each with a header. headers: the tokens that may begin a header, and the token
    that ends it. answer: the beginning of the message with the content, and the rest of its header.
    """

    name: str
    open: str
    close: str
    begins_open: bool = False  # an output is reasoning from its beginning, also without the marker
    inner: tuple[str, ...] = ()
    headers: tuple[frozenset[str], str] | None = None
    answer: tuple[str, str] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """The tokens that the parser has to see."""
        return (*(self.inner or (self.open,)), self.close)


THINK = ReasoningFormat("think", "<think>", "</think>")
REASONING_FORMATS = (
    THINK,
    ReasoningFormat("deepseek_r1", "<think>", "</think>", begins_open=True),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("gemma4", "<|channel>thought\n", "<channel|>", inner=("<|channel>",)),
    ReasoningFormat(  # harmony, of gpt-oss
        "openai_gptoss",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        inner=("<|start|>", "<|channel|>", "<|message|>"),
        headers=(frozenset({"<|start|>", "<|channel|>"}), "<|message|>"),
        answer=("<|start|>assistant", "<|channel|>final<|message|>"),
    ),
)


@dataclass(frozen=True)
class Thinking:
    """The reasoning that an output may begin with.

    is_open: the prompt ends with the opening marker, or within the reasoning; close_id: the closing marker,
    if it is a token by itself. Then its characters, spelled by other tokens, are part of the reasoning.
    """

    format: ReasoningFormat = THINK
    is_open: bool = False
    close_id: int | None = None


@dataclass(frozen=True)
class ModelReasoning:
    """How the served model writes its reasoning, detected in its chat template."""

    format: ReasoningFormat | None = None  # None: it writes none, or it stays part of the content
    token_id: TokenId = lambda _text: None

    @classmethod
    def of(cls, template: ChatTemplate | None, tokenizer: Tokenizer, parser: str | None) -> ModelReasoning:
        """Finds the reasoning of a model: the first format of which a marker is in the template. The result
        has no format if there is no template or no marker.

        parser: --reasoning-parser, the name of a format, which counts instead; None: it is not given. A name
        that no format has turns reasoning off.
        """
        source = template.source if template else ""
        for form in REASONING_FORMATS:
            is_found = form.open in source or form.close in source
            if form.name == parser or (parser is None and is_found):
                return cls(form, tokenizer.token_to_id)
        return cls()

    def thinking(self, prompt: str, continued: str = "") -> Thinking | None:
        """Returns the reasoning that an output for this prompt may begin with. None: the model writes none,
        the prompt ends behind the reasoning, or `continued` has text and ends outside of reasoning.

        prompt: the rendered chat; continued: the assistant's text that the prompt ends with, if that text is
        to be continued. The result is open if the prompt ends within reasoning, or if every output of the
        format begins with it.
        """
        form = self.format
        if form is None:
            return None
        is_within = continued.rfind(form.open) > continued.rfind(form.close)
        is_open = is_within or prompt.rstrip().endswith(form.open.rstrip())
        is_closed = bool(continued.strip()) or prompt.rstrip().endswith(form.close)
        if is_closed and not is_open:
            return None
        return Thinking(form, is_open or form.begins_open, self.token_id(form.close))

    def in_answer(self, grammar: str) -> str:
        """Returns the grammar of a structured output with the header that the model writes before its
        content. Without a header, and for "" (no grammar), this is `grammar` itself. Raises GrammarError for
        a grammar that is too large."""
        form = self.format
        if not grammar or form is None or form.answer is None:
            return grammar
        begin, header = (terminals(part, form.markers, self.token_id) for part in form.answer)
        return of_rules([f"start: ({begin})? {header} body"], grammar, "body")

    def grammar(self, thinking: Thinking, answer: str, budget: int | None = None) -> str:
        """Returns the grammar of reasoning and of what follows it. Raises GrammarError for one that is too
        large.

        If the prompt has not opened the reasoning, an output without reasoning is allowed, too, unless
        `answer` is "" and the opening marker is no token by itself. answer: the grammar of what follows, "":
        any tokens. budget: the most tokens of reasoning, None: any number; a budget needs
        `thinking.close_id`. 0: the closing marker comes first.
        """
        form = thinking.format
        rest = r"/\s{0,2}/ answer" if answer else "any"
        start = f"thoughts {rest}"
        if not thinking.is_open:
            start = f"{terminals(form.open, form.markers, self.token_id)} {start}"
            open_id = self.token_id(form.open)
            if answer:
                start += " | answer"
            elif open_id is not None:
                start += f" | <[^{open_id}]> any"
        rules = [f"start: {start}", "any: <[*]>*", *self._thoughts(thinking, budget)]
        return of_rules(rules, answer, "answer")

    def _thoughts(self, thinking: Thinking, budget: int | None) -> list[str]:
        """Returns the rule `thoughts` in Lark, which includes the closing marker, and the rules that it uses.
        budget: the most tokens before that marker; None: any number."""
        close = thinking.format.close
        if budget is None:
            return up_to(close, self.token_id, "thoughts", "THOUGHT")
        if budget == 0:
            return [f"thoughts: <[{thinking.close_id}]>"]
        return [
            f"thoughts: thought <[{thinking.close_id}]>",
            rf"thought[max_tokens={budget}]: /(.|\n)*/",
        ]
