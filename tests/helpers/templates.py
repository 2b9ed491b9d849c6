"""Chat templates of published models, and templates of our own with the rules of others.

`make test` installs the published ones from npm (package.json) and PyPI (published.txt) into the environment; where that failed
there are none.
"""

import json
import os
import sys
from pathlib import Path

from text.template import ChatTemplate

FOLDER = Path(sys.prefix) / "templates" / "node_modules" / "@lenml"
# A file a model, with its template and more.
COLLECTION = Path(os.environ.get("PUBLISHED") or Path(sys.prefix) / "published") / "xinference" / "model" / "llm" / "models"

# What raises for anything but users and assistants in turns, as Llama 2, Mistral 0.1, Mixtral and Gemma 2 do.
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
END = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
# What Granite 4 and Nemotron 3 say about tools.
TOOLS = (
    "{% if tools %}\n\nYou have access to these functions:\n<tools>{% for tool in tools %}{{ '\n' }}TOOL{% endfor %}{{ '\n' }}"
    "</tools>\n\nIf you call a function, reply in this format:\n\n<tool_call>\nCALL\n</tool_call>{% endif %}"
)
# LFM2.5's, with words in the place of what differs from one of them to another.
LFM = (
    "{% set ns = namespace(last=-1, system='') %}{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set ns.system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
    "{% if ns.system or tools %}<|im_start|>system\n{{ ns.system }}{% if tools %}{{ '\n\n' if ns.system }}LISTED{% endif %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'NEWEST' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% set is_kept = KEPT %}"
    "{% set text = m.content if is_kept else m.content.split('</think>')[-1] | trim %}RESPONSE{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LFM_CALLS = (
    "{% if m.tool_calls is defined %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={% if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}"
    "{% else %}{{ v }}{% endif %}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}"
    "{% endfor %}]<|tool_call_end|>{% endif %}"
)
LFM_TOOLS = "Today's date: {{ strftime_now('%Y-%m-%d') }}\n\nList of tools: {{ tools | tojson }}"
LFM_THINKING = "{% if m.thinking is defined and is_kept %}<think>{{ m.thinking }}</think>{% endif %}"


def with_words(template, **words):
    for word, text in words.items():
        template = template.replace(word, text)
    return template


RULES = {
    "llama-2": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set messages = messages[1:] %}{% endif %}"
        + ALTERNATES
        + "{% if loop.first and system %}{% set text = '<<SYS>>' + system + '<</SYS>>' + m.content %}"
        "{% else %}{% set text = m.content %}{% endif %}"
        "{% if m.role == 'user' %}[INST] {{ text | trim }} [/INST]{% elif m.role == 'assistant' %}"
        " {{ m.content | trim }} </s>{% endif %}{% endfor %}"
    ),
    "mistral-0.1, mixtral": ALTERNATES
    + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    "gemma-2": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + ALTERNATES
    + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}",
    "phi-3": "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}" + END,
    "phi-4": "{% for m in messages %}{% if m.role == 'system' %}<|im_start|>system<|im_sep|>{{ m.content }}<|im_end|>"
    "{% elif m.role == 'user' %}<|im_start|>user<|im_sep|>{{ m.content }}<|im_end|>"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant<|im_sep|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}" + END,
    "smollm2": CHATML + END,
    "zephyr": "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}</s>\n"
    "{% elif m.role == 'system' %}<|system|>\n{{ m.content }}</s>\n"
    "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}</s>\n{% endif %}{% endfor %}" + END,
    # The last system message wins, and stands in front of all.
    "deepseek-r1": "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}{% for m in messages %}"
    "{% if m.role == 'user' %}<User>{{ m.content }}{% elif m.role == 'assistant' and m.content %}"
    "<Assistant>{{ m.content.split('</think>')[-1] }}<end>{% endif %}{% endfor %}" + END,
    "granite": "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}"
    "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endif %}{% endfor %}" + END,
    # Granite 4.0 and 4.1, whose calls are JSON, and may have it in a text.
    "granite-4": "<|start_of_role|>system<|end_of_role|>{{ messages[0].content if messages[0].role == 'system' else 'Help.' }}"
    + with_words(TOOLS, TOOL="{{ tool | tojson }}", CALL='{"name": <function-name>, "arguments": <args-json-object>}')
    + "<|end_of_text|>\n{% for m in messages %}{% if m.role == 'user' or m.role == 'system' and not loop.first %}"
    "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% elif m.role == 'assistant' %}"
    "<|start_of_role|>assistant<|end_of_role|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first }}<tool_call>\n{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{{ '}' }}\n</tool_call>"
    "{% endfor %}<|end_of_text|>\n{% elif m.role == 'tool' %}"
    "{{ '<|start_of_role|>user<|end_of_role|>' if not loop.previtem or loop.previtem.role != 'tool' }}\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>{{ '<|end_of_text|>\n' if loop.last or loop.nextitem.role != 'tool' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    # Nemotron 3: an empty thought stands where a thought is left out, and low effort in the newest message of the user.
    "nemotron-3": "{% set thinks = enable_thinking if enable_thinking is defined else True %}"
    "{% set leaves_out = truncate_history_thinking if truncate_history_thinking is defined else True %}"
    "{% set ns = namespace(last=-1) %}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set messages = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "<|im_start|>system\n{{ system }}"
    + with_words(
        TOOLS,
        TOOL="<function>\n<name>{{ tool.function.name }}</name>\n<description>{{ tool.function.description }}</description>"
        "\n{{ tool.function.parameters | tojson }}\n</function>",
        CALL="<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>",
    )
    + "<|im_end|>\n{% for m in messages %}{% if m.role == 'assistant' %}{% set text = m.content or '' %}"
    "{% if m.reasoning_content %}{% set text = '<think>\n' + m.reasoning_content + '</think>' + text %}"
    "{% elif '</think>' not in text %}{% set text = '<think></think>' + text %}{% endif %}"
    "{% if leaves_out and loop.index0 < ns.last %}{% set text = '<think></think>' + text.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>assistant\n{{ text | trim }}{% for c in m.tool_calls or [] %}{{ '\n' if loop.first }}"
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v | tojson if v is mapping or v is sequence and v is not string else v }}\n</parameter>\n{% endfor %}</function>\n"
    "</tool_call>\n{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n' if not loop.previtem or loop.previtem.role != 'tool' }}<tool_response>\n{{ m.content }}\n"
    "</tool_response>\n{{ '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{{ '\n\n{reasoning effort: low}' if low_effort and loop.index0 == ns.last }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\n' if thinks else '<think></think>' }}"
    "{% endif %}",
    # The first LFM2.5-1.2B, Instruct and Thinking: calls are not written, reasoning in the content stays in the last response.
    "lfm2.5-1.2b": with_words(
        LFM,
        LISTED="List of tools: [{% for tool in tools %}{{ tool | tojson }}{{ ', ' if not loop.last }}{% endfor %}]",
        NEWEST="assistant",
        KEPT="keep_past_thinking or loop.index0 == ns.last",
        RESPONSE="{{ text }}",
    ),
    # The later ones: reasoning is called `thinking`, and stays in the last response, or behind the newest message of the user.
    "lfm2.5": with_words(
        LFM,
        LISTED=LFM_TOOLS,
        NEWEST="assistant",
        KEPT="keep_past_thinking or loop.index0 == ns.last",
        RESPONSE="{% generation %}"
        + LFM_THINKING
        + LFM_CALLS.replace("'{{ v }}'", '"{{ v }}"')
        + "{{ text }}{% endgeneration %}",
    ),
    "lfm2.5-8b": with_words(
        LFM,
        LISTED=LFM_TOOLS,
        NEWEST="user",
        KEPT="preserve_thinking or loop.index0 > ns.last",
        RESPONSE="{% generation %}" + LFM_THINKING + "{{ text }}" + LFM_CALLS + "{% endgeneration %}",
    ),
    # One message with instructions, of either role, in front of all; later ones are left out.
    "gpt-oss": "{% if messages[0].role in ['system', 'developer'] %}<|start|>developer<|message|>{{ messages[0].content }}"
    "<|end|>{% endif %}{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}" + END,
    # Qwen 3.5 refuses a system message that is not the first.
    "system first": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
}


def published() -> dict[str, ChatTemplate]:
    """By the name of the model."""
    found = {path.parent.name.removeprefix("tokenizer-"): ChatTemplate.load(path) for path in FOLDER.glob("*/models")}
    return {name: template for name, template in found.items() if template}


def collected(model: str) -> ChatTemplate | None:
    """Of a model that the collection names."""
    path = COLLECTION / f"{model}.json"
    if not path.exists():
        return None
    described = json.loads(path.read_text())
    described = described[0] if isinstance(described, list) else described
    return ChatTemplate(described["chat_template"], {"bos_token": "", "eos_token": ""})


def with_rules() -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(source, {}) for name, source in RULES.items()}
