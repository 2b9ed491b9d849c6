"""Which format of tool calls a chat template writes: it is found by rendering a call, not by a marker in the source."""

import pytest
import templates
import tiny_tokenizers
from tool_calls import FORMATS, TEMPLATES

import web
from config import Config
from run import ConfigError
from text.output.tool_detection import model_tools, written_format
from text.output.tool_formats import AS_TEXT, format_named
from text.template import ChatTemplate
from text.template_capabilities import TemplateCapabilities
from text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_of_calls_is_the_one_that_reads_what_the_template_writes(name, tokenizer):
    template = ChatTemplate(TEMPLATES[name], {})
    capabilities = TemplateCapabilities.of(template)
    assert capabilities.tools
    found = model_tools(template, capabilities, tokenizer, None)
    assert found.format.name == name and not found.in_prompt
    assert found.short_ids == name.startswith("mistral")
    assert found.parallel == (name not in ("llama3_json", "openai")), "they write one call of a message"
    for parser in ("none", "hermes"):
        assert model_tools(template, TemplateCapabilities(), tokenizer, parser).format.name == parser
    named = model_tools(template, TemplateCapabilities(), tokenizer, "mistral").format.name
    assert named == ("mistral_v11" if name == "mistral_v11" else "mistral"), "vLLM has one name for both"


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
MARKED = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
GLM = (
    "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"
)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (CALLS, None),
        ("{{ '<tool_call>' if tools }}" + CALLS, None),
        (CALLS.replace("CALL", MARKED), "hermes"),
        (CALLS.replace("CALL", MARKED.replace(" | tojson", " | list")), None),
        (CALLS.replace("CALL", MARKED.replace("arguments", "input", 1)), None),
        (CALLS.replace("CALL", "<tool_call>{{ c.function.name }}</tool_call>"), None),
        (CALLS.replace("CALL", MARKED.replace("<tool_call>", "<call>")), None),
        # Arguments that have to be a text.
        (CALLS.replace("CALL", MARKED.replace("c.function.arguments | tojson", "'' + c.function.arguments")), "hermes"),
        # Values as Python writes them.
        (CALLS.replace("CALL", GLM), "glm45"),
        # What a model thinks may stand in front.
        (CALLS.replace("CALL", "<think></think>" + MARKED), "hermes"),
        ("{% for m in messages %}{{ m.content if loop.first else raise_exception('no') }}{% endfor %}", None),
    ],
)
def test_a_format_that_does_not_read_the_call_is_not_taken_for_it(template, name):
    found = written_format(ChatTemplate(template, {}))
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }}", None),
        ("{{ tools }}<tool_call>", None),
        ("{{ tools }}a JSON object within <tool_call></tool_call> XML tags", "hermes"),
        ("{{ tools }}{% set calls = [func_name] %}", None),
        ("{{ tools }}<|tool_call_start|>", "lfm2"),
        ("{{ tools }}formatted as functools[{}]", "phi4_mini_json"),
        ("{{ tools }}respond only with <|tool_call|> followed by a JSON list", "phi4_mini_json"),
        ("{{ tools }}<start_of_turn>[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools }}<|python_start|>", "pythonic"),
        # Llama 4's, which writes earlier calls in another format than it asks for.
        ("{{ tools }}<|python_start|>" + CALLS.replace("CALL", "<|python_start|><|python_end|>" + MARKED[11:-12]), "pythonic"),
    ],
)
def test_a_template_that_writes_no_calls_may_describe_them(template, name, tokenizer):
    found = model_tools(ChatTemplate(template, {}), TemplateCapabilities(), tokenizer, None)
    assert (found.format and found.format.name) == name


def test_calls_are_those_of_lfm2_if_their_marker_is_a_token_and_the_template_writes_none(tmp_path):
    learned = tiny_tokenizers.byte_level()
    learned.add_special_tokens(["<|tool_call_start|>"])
    tokenizer = Tokenizer(tiny_tokenizers.save(learned, tmp_path))
    assert model_tools(ChatTemplate("{{ tools }}", {}), TemplateCapabilities(), tokenizer, None).format.name == "lfm2"
    assert model_tools(ChatTemplate(TEMPLATES["hermes"], {}), TemplateCapabilities(), tokenizer, None).format.name == "hermes"


PUBLISHED = {
    "llama3_2": "llama3_json",
    "mistral_nemo": "mistral",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
}


@pytest.mark.parametrize(("model", "name"), PUBLISHED.items())
def test_a_published_template_writes_calls_in_its_format(model, name):
    if model not in (published := templates.published()):
        pytest.skip("the published templates are not installed")
    assert written_format(published[model].for_tools).name == name


COLLECTED = {
    "glm-4.5": "glm45",
    "GLM-4.6": "glm45",
    "GLM-4.7": "glm45",
    "glm-5": "glm45",
    "Kimi-K2.5": "kimi_k2",
    "MiniMax-M2": "minimax_m2",
    "gpt-oss": "openai",
    "Deepseek-V3.1": "deepseek_v31",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3-Thinking": "hermes",
    "qwen3.5": "qwen3_coder",
    "llama-3.3-instruct": "llama3_json",
    "mistral-instruct-v0.3": "mistral",
    "MiniMax-M3": None,
    "seed-oss": None,
}


@pytest.mark.parametrize(("model", "name"), COLLECTED.items())
def test_a_template_of_the_collection_writes_calls_in_its_format(model, name, tokenizer):
    if not templates.COLLECTION.exists():
        pytest.skip("the published templates are not installed")
    template = templates.collected(model)
    capabilities = TemplateCapabilities.of(template)
    assert capabilities.tools and capabilities.calls
    found = model_tools(template, capabilities, tokenizer, None)
    assert (found.format and found.format.name) == name
    assert found.parallel == capabilities.several_calls == (model not in ("gpt-oss", "llama-3.3-instruct"))


@pytest.mark.parametrize(
    ("tool_calls", "name"),
    [
        ({"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json"}, "hermes"),
        (
            {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>"},
            },
            "qwen3_coder",
        ),
        ({"open": ["<tool_call>"], "content_args": {"tag_pattern": "<arg_key>(?P<key>.*?)</arg_key>"}}, "glm45"),
        ({"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "content": "json"}, "gemma4"),
        ({"open": "<|tool_call_start|>", "close": "<|tool_call_end|>", "content": "text"}, "lfm2"),
        ({"open": "[TOOL_CALLS]", "content": "json"}, "mistral"),
        ({"open_pattern": r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]"}, "mistral_v11"),
        ({"open": "<call>"}, None),
        (None, None),
    ],
)
def test_a_response_template_names_the_format_where_a_template_writes_no_calls(tool_calls, name, tokenizer, tmp_path):
    made = {"response_template": {"start_anchor": "x", "fields": {"tool_calls": tool_calls}}}
    for_tools = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "{{ tools }}"}]
    for n, written in enumerate(("{{ tools }}", for_tools)):
        folder = tmp_path / str(n)
        folder.mkdir()
        template = ChatTemplate.load(tiny_tokenizers.save(tiny_tokenizers.byte_level(), folder, chat_template=written, **made))
        found = model_tools(template, TemplateCapabilities(), tokenizer, None)
        assert (found.format and found.format.name) == name


@pytest.mark.parametrize("response_template", ["text", {"fields": []}, {}, {"fields": {"tool_calls": "<tool_call>"}}])
def test_what_the_template_writes_goes_before_its_response_template(response_template, tokenizer):
    template = ChatTemplate(TEMPLATES["glm45"], {}, response_template)
    assert model_tools(template, TemplateCapabilities(), tokenizer, None).format.name == "glm45"
    assert model_tools(ChatTemplate("{{ tools }}", {}, response_template), TemplateCapabilities(), tokenizer, None) is not None


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ messages }}[TOOL_CALLS]f[ARGS]{}", None])
def test_without_a_place_for_tools_calls_are_read_as_the_prompt_asks_for_them(template, tokenizer):
    template = ChatTemplate(template, {}) if template else None
    for parser in (None, "hermes", "mistral"):
        found = model_tools(template, TemplateCapabilities(tools=False), tokenizer, parser)
        assert found.in_prompt and found.format.name == "hermes"
    refusing = model_tools(template, TemplateCapabilities(tools=False), tokenizer, "none")
    assert refusing.in_prompt and refusing.format is AS_TEXT


def test_a_template_of_its_own_for_tools_is_used_for_them(tokenizer, tmp_path):
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools }}" + TEMPLATES["hermes"]}]
    folder = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, chat_template=templates)
    template = ChatTemplate.load(folder)
    assert template.render([{"role": "user", "content": ""}]) == "d"
    assert template.for_tools.render([{"role": "user", "content": ""}], ["f"]).startswith("['f']")
    assert model_tools(template, TemplateCapabilities(), tokenizer, None).format.name == "hermes"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("qwen3_xml", "qwen3_coder"), ("llama4_pythonic", "pythonic"), ("granite4", "hermes"), ("ernie45", "hermes")],
)
def test_a_tool_parser_may_have_vllms_name(theirs, ours, tokenizer):
    assert format_named(theirs).name == format_named(ours).name == ours
    assert model_tools(ChatTemplate("{{ tools }}", {}), TemplateCapabilities(tools=True), tokenizer, theirs).format.name == ours


def test_a_tool_parser_that_there_is_not_ends_the_startup_with_one_line_that_names_those_that_there_are(monkeypatch):
    with pytest.raises(ConfigError, match=r"^--tool-parser \(TOOL_PARSER\) 'hermas': must be one of hermes, .*, none$"):
        format_named("hermas")
    monkeypatch.setattr(web.configuration, "resolved", lambda: Config(model_id="m", tool_parser="hermas"))
    monkeypatch.setattr(web, "die_with_parent", lambda: None)
    monkeypatch.setattr("logs.set_up", lambda *_settings: None)
    assert web.main() == 2
