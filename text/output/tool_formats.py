"""The formats in which models write tool calls: a row each, of the class of its syntax (call_syntaxes.py).

Which of them a chat template writes is found by tool_detection.py. Sources: the models' chat templates, those
that mistral-common and vLLM publish for Mistral and DeepSeek, and OpenAI's description of harmony.
"""

from __future__ import annotations

from run import ConfigError
from text.output.call_syntaxes import (
    GemmaFormat,
    NamedFormat,
    PythonFormat,
    TaggedFormat,
    ToolFormat,
)
from text.output.json_mender import GEMMA_QUOTE

# What the formats with calls in a list, as in [call, call], share.
LIST = {"first": "[", "next": ",", "ends": ("]",), "between": '"," ws'}
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK = {
    "open": "<｜tool▁calls▁begin｜>",
    "close": "<｜tool▁calls▁end｜>",
    "next": DEEPSEEK_CALL,
    "inner": (DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END),
    "prefix": "ws next",
    "suffix": "ws close",
}
HARMONY_START = '"<|start|>assistant"?'
HARMONY_CALL = "to=functions."
HARMONY_HEADS = (
    "<|channel|>commentary ",
    "<|start|>assistant<|channel|>commentary ",
    "<|start|>assistant ",
    "<|start|>assistant<|channel|>analysis ",
    "<|channel|>analysis ",
    "",
)
TOOL_FORMATS = (
    ToolFormat(
        name="hermes",
        other_names=("granite4", "ernie45"),
        open="<tool_call>",
        close="</tool_call>",
        described_by=("within <tool_call></tool_call> XML tags",),
        prefix="ws",
        between="ws close ws open ws",
        suffix="ws close",
    ),
    ToolFormat(
        name="mistral",
        **LIST,
        open="[TOOL_CALLS]",
        prefix='ws "["',
        suffix='"]"',
    ),
    ToolFormat(
        name="llama3_json",
        other_names=("llama4_json",),
        open="<|python_tag|>",
        implicit_start="{",
        ends=(";",),
        before="",
        arguments_key="parameters",
        between='";" ws',
    ),
    PythonFormat(
        name="pythonic",
        other_names=("llama4_pythonic",),
        **LIST,
        open="<|python_start|>",
        close="<|python_end|>",
        described_by=("[func_name1(", "<|python_start|>"),
        implicit_start="[",
        before='"["',
        suffix='"]"',
    ),
    TaggedFormat(
        name="qwen3_coder",
        other_names=("qwen3_xml",),
        open="<tool_call>",
        bare=("<function={}>",),
        close="</tool_call>",
        next="<function=",
        name_end=">",
        key="<parameter=",
        key_end=">",
        value_end="</parameter>",
        call_end="</function>",
        line_breaks=True,
        prefix="ws next",
        between="ws close ws open ws next",
        suffix="ws close",
    ),
    NamedFormat(
        name="mistral_v11",
        open="[TOOL_CALLS]",
        separator="[ARGS]",
        separators=r"(\[CALL_ID\][A-Za-z0-9]*)?\[ARGS\]",  # v11 writes an id, v13 does not
        inner=("[ARGS]", "[CALL_ID]"),
        between="open",
    ),
    NamedFormat(
        name="deepseek_v3",
        **DEEPSEEK,
        bare=(f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}{{}}",),
        name_begin=f"function{DEEPSEEK_SEPARATOR}",
        separator="\n```json\n",
        separators=r"\s*```json",
        tail=f"\n```{DEEPSEEK_CALL_END}",
        between=r'"\n" next',
    ),
    NamedFormat(
        name="deepseek_v31",
        **DEEPSEEK,
        bare=(f"{DEEPSEEK_CALL}{{}}",),
        separator=DEEPSEEK_SEPARATOR,
        separators=DEEPSEEK_SEPARATOR,
        tail=DEEPSEEK_CALL_END,
        between="next",
    ),
    TaggedFormat(
        name="glm45",
        other_names=("glm47",),
        open="<tool_call>",
        bare=("{}\n<arg_key>", "{}<arg_key>"),
        close="</tool_call>",
        key="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        call_end="</tool_call>",
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        between="ws open",
    ),
    NamedFormat(
        name="kimi_k2",
        open="<|tool_calls_section_begin|>",
        bare=("<|tool_call_begin|>{}", "<|tool_call_begin|>functions.{}"),
        close="<|tool_calls_section_end|>",
        next="<|tool_call_begin|>",
        name_begin="functions.",
        number="/:[0-9]{1,4}/",
        separator="<|tool_call_argument_begin|>",
        separators=r"(:[0-9]*)?\s*<\|tool_call_argument_begin\|>",
        tail="<|tool_call_end|>",
        inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        prefix="ws next",
        between="next",
        suffix="ws close",
    ),
    TaggedFormat(
        name="minimax_m2",
        open="<minimax:tool_call>",
        bare=('<invoke name="{}">',),
        close="</minimax:tool_call>",
        next='<invoke name="',
        name_end='">',
        key='<parameter name="',
        key_end='">',
        value_end="</parameter>",
        call_end="</invoke>",
        prefix="ws next",
        between="ws next",
        suffix="ws close",
    ),
    PythonFormat(
        name="lfm2",
        **LIST,
        open="<|tool_call_start|>",
        bare=("[{}(",),
        close="<|tool_call_end|>",
        described_by=("<|tool_call_start|>",),
        prefix='ws "["',
        suffix='"]" close',
    ),
    ToolFormat(
        name="phi4_mini_json",
        other_names=("granite",),
        **LIST,
        open="<|tool_call|>",
        also_open=("functools",),
        close="<|/tool_call|>",
        described_by=("functools[", "<|tool_call|> followed by"),  # the second is Granite 3's
        prefix='ws "["',
        suffix='"]"',
    ),
    NamedFormat(
        name="openai",  # harmony, of gpt-oss
        open=HARMONY_HEADS[0] + HARMONY_CALL,
        also_open=tuple(head + HARMONY_CALL for head in HARMONY_HEADS[1:]),
        bare=tuple(f"{head}to={{}}" for head in HARMONY_HEADS),
        ends=("<|call|>",),
        separator=" <|constrain|>json<|message|>",
        # A header that does not name the function is left out by `OutputParser`.
        separators=r"(<\|channel\|>\w+)?(\s*<\|constrain\|>\w*|\s+\w+)?(\s*<\|message\|>)?",
        inner=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
        before=f"{HARMONY_START} open",
        between=f'"<|call|>" {HARMONY_START} open',
        auto=f'({HARMONY_START} "<|channel|>commentary<|message|>" TEXT "<|end|>")* '
        f'(calls | ({HARMONY_START} "<|channel|>final<|message|>")? TEXT)',
    ),
    GemmaFormat(
        name="gemma4",
        open="<|tool_call>",
        bare=("call:{}{{",),
        close="<tool_call|>",
        inner=(GEMMA_QUOTE,),
        between="close open",
        suffix="close",
    ),
)
HERMES = TOOL_FORMATS[0]  # which TOOLS_PROMPT (api/chats/template_adapter.py) asks for
AS_TEXT = ToolFormat(name="none", open="")  # calls are not read: they stay text


def format_named(name: str) -> ToolFormat:
    """Returns the format of this name, or of vLLM's parser of this name; AS_TEXT for `none`. Raises
    ConfigError for any other name."""
    formats = (*TOOL_FORMATS, AS_TEXT)
    for form in formats:
        if name in (form.name, *form.other_names):
            return form
    names = ", ".join(form.name for form in formats)
    raise ConfigError(f"--tool-parser (TOOL_PARSER) {name!r}: must be one of {names}")
