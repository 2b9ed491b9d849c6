"""Reasoning: its format in the chat template, the grammar of what follows it, and a limit of its tokens."""

import pytest
import templates
import tiny_tokenizers
from grammars import Judge
from tool_calls import FORMATS, KINDS, WRITTEN, beside, parsed_pieces, thinking_of, tokenizer_of, use

from api.generation.prepared_request import PreparedRequest, TokenizedPrompt
from api.generation.response_writer import GeneratedSequence
from config import REASONING_PARSERS
from protocol import Token
from text.grammar import of_json_schema, of_regex
from text.output import reasoning_formats
from text.output.parser import Content, ParserConfig, Reasoning
from text.output.reasoning_formats import THINK, ModelReasoning, Thinking
from text.stream import TextStream
from text.template import ChatTemplate
from text.tokenizer import Tokenizer

PUBLISHED = {"qwen3": "think", "qwen2_5": None, "llama3_2": None, "gemma3": None, "mistral_nemo": None}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return tokenizer_of(request.param)


def model_of(tokenizer):
    return ModelReasoning(THINK, tokenizer.token_to_id)


def test_every_format_may_be_set():
    assert [form.name for form in reasoning_formats.REASONING_FORMATS] == list(REASONING_PARSERS)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ m.content.split('</think>')[-1] }}", "think"),
        ("[THINK]{{ m.reasoning_content }}[/THINK]", "mistral"),
        ("<|channel>thought\n{{ m.reasoning }}<channel|>", "gemma4"),
        ("{{ m.content }}", None),
    ],
)
def test_the_format_is_detected_in_the_chat_template(source, name, tmp_path):
    tokenizer = Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path))
    template = ChatTemplate(source, {})
    found = ModelReasoning.of(template, tokenizer, None).format
    assert (found and found.name) == name
    assert ModelReasoning.of(template, tokenizer, "none").format is None
    assert ModelReasoning.of(template, tokenizer, "seed_oss").format.name == "seed_oss"
    assert ModelReasoning.of(None, tokenizer, None).format is None


@pytest.mark.parametrize(("model", "name"), PUBLISHED.items())
def test_a_published_template_shows_its_format(model, name):
    if model not in (published := templates.published()):
        pytest.skip("the published templates are not installed")
    found = ModelReasoning.of(published[model], tokenizer_of("special"), None)
    assert (found.format and found.format.name) == name
    if name is None:
        return
    for options, expected in (({}, False), ({"enable_thinking": False}, None)):
        prompt = published[model].render([{"role": "user", "content": "Hi"}], None, options)
        thinking = found.thinking(prompt)
        assert (thinking and thinking.is_open) == expected
    assert thinking is None


@pytest.mark.parametrize(
    ("prompt", "continued", "is_open"),
    [
        ("Hi<assistant>", "", False),
        ("Hi</think><assistant>", "", False),
        ("Hi<assistant><think>\n", "", True),
        ("Hi<assistant><think>\n\n</think>\n\n", "", None),
        ("Hi<assistant>Well", "Well", None),
        ("Hi<assistant><think>Well", "<think>Well", True),
        ("Hi<assistant><think>Well</think>So", "<think>Well</think>So", None),
    ],
)
def test_the_end_of_the_prompt_says_whether_reasoning_may_follow(prompt, continued, is_open):
    thinking = ModelReasoning(THINK).thinking(prompt, continued)
    assert (thinking and thinking.is_open) == is_open
    assert ModelReasoning().thinking(prompt, continued) is None


@pytest.mark.parametrize("begin", ["inside", "before"])
def test_a_grammar_begins_after_the_reasoning(begin, tokenizer):
    grammar = model_of(tokenizer).grammar(thinking_of(begin), of_json_schema({"const": 1}))
    judge = Judge(tokenizer, grammar)
    opening = "<think>" if begin == "before" else ""
    assert judge.allows(opening + "\nHm, {2}?\n</think>\n\n1")
    assert judge.allows(opening + "Hm</think>1")
    assert judge.allows(opening + "Hm</think>2") is False
    assert bool(judge.allows("1")) == (begin == "before"), "a model need not think"


@pytest.mark.parametrize("name", FORMATS)
def test_after_reasoning_an_output_is_a_call_or_has_the_format_of_the_text(name, tokenizer):
    found = use(name, token_id=tokenizer.token_to_id)
    grammar = beside(found, "grammar", of_regex("[0-9]+")).constraint.grammar
    judge = Judge(tokenizer, model_of(tokenizer).grammar(thinking_of("inside"), grammar))
    assert judge.allows("Hm</think>" + WRITTEN[name])
    assert judge.allows("Hm</think>12")
    assert judge.allows("Hm</think>x") is False


@pytest.mark.parametrize("answer", ["", of_json_schema({"const": 1})])
@pytest.mark.parametrize("begin", ["inside", "before"])
@pytest.mark.parametrize("kind", ["added", "special"])
def test_a_budget_limits_the_tokens_of_reasoning(kind, begin, answer):
    tokenizer = tokenizer_of(kind)
    thinking = Thinking(THINK, begin == "inside", tokenizer.token_to_id("</think>"))
    opening = "<think>" if begin == "before" else ""
    allows = Judge(tokenizer, model_of(tokenizer).grammar(thinking, answer, 5)).allows
    assert allows(opening + "11111</think>1")
    assert allows(opening + "</think>1")
    assert allows(opening + "111111") is False
    assert allows(opening + "11111</think>2") == (not answer)
    if not answer:
        assert allows(opening + "1</think>Hi <tool_call>{}</tool_call><think>what follows is free")
        assert (allows("what follows") is True) == (begin == "before")
    none_allows = Judge(tokenizer, model_of(tokenizer).grammar(thinking, answer, 0)).allows
    assert none_allows(opening + "</think>1")
    assert none_allows(opening + "1") is False


@pytest.mark.parametrize("kind", ["added", "special"])
def test_a_spelled_marker_is_part_of_the_reasoning_where_the_marker_is_a_token(kind, tmp_path):
    made = tokenizer_of(kind)
    tokenizer = Tokenizer(tiny_tokenizers.save(made, tmp_path))
    close_id = made.token_to_id("</think>")
    spelled = [made.token_to_id(character) for character in "a</think>b"]
    prepared = PreparedRequest("", parser_config=ParserConfig(None, Thinking(THINK, True, close_id)))
    sequence = GeneratedSequence(tokenizer, TokenizedPrompt(prepared, [], 99), 0, 0)
    for token in [*spelled, close_id, made.token_to_id("c")]:
        sequence.take(Token(0, token, 0.0))
    sequence.truncate()
    assert (sequence.output.text_of(Reasoning), sequence.output.text_of(Content)) == ("a</think>b", "c")
    assert sequence.reasoning_tokens == len(spelled) + 1


HARMONY = reasoning_formats.REASONING_FORMATS[-1]
HARMONY_TOKENS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
FINAL = "<|channel|>final<|message|>"
THOUGHTS = "<|channel|>analysis<|message|>Hm.<|end|>"
AGAIN = "<|start|>assistant"


@pytest.fixture
def harmony():
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_special_tokens(HARMONY_TOKENS)
    return tokenizer


@pytest.mark.parametrize(
    ("written", "thoughts", "content"),
    [
        (THOUGHTS + AGAIN + FINAL + "Yes<|return|>", "Hm.", "Yes"),
        (FINAL + "Yes", "", "Yes"),
        (f"{THOUGHTS}{AGAIN}<|channel|>commentary<|message|>I look.<|end|>{AGAIN}{FINAL}So", "Hm.", "I look.So"),
        ("<|channel|>analysis<|message|>H", "H", ""),
        ("<|channel|>ana", "", ""),
        ("Yes", "", "Yes"),
    ],
)
def test_of_several_messages_the_headers_are_left_out(harmony, tmp_path, written, thoughts, content):
    tokenizer = Tokenizer(tiny_tokenizers.save(harmony, tmp_path))
    stream = TextStream(tokenizer, [])
    pieces = [piece for i in harmony.encode(written).ids for piece in stream.push(i, 0.0, [], False)] + stream.finish()
    close_id = harmony.token_to_id("<|end|>")
    whole = parsed_pieces(ParserConfig(None, Thinking(HARMONY, False, close_id)), pieces)
    assert (whole.reasoning, whole.content) == (thoughts, content)


def test_a_structured_output_has_the_header_of_its_message(harmony):
    model = ModelReasoning(HARMONY, harmony.token_to_id)
    grammar = model.in_answer(of_json_schema({"const": 1}))
    thinking = Thinking(HARMONY, False, harmony.token_to_id("<|end|>"))
    allows = Judge(harmony, model.grammar(thinking, grammar)).allows
    assert allows(THOUGHTS + AGAIN + FINAL + "1") and allows(FINAL + "1")
    assert allows(THOUGHTS + "1") is allows(FINAL + "2") is False
    assert ModelReasoning(THINK).in_answer(grammar) == grammar
