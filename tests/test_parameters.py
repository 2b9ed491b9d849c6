"""docs/api.md says of every parameter whether it is honoured, refused or ignored. Here each is sent, and it must be so."""

import re

import pytest
from fakes.model import EOS

from config import HERE
from schema import ChatRequest, CompletionRequest, Parameters

TABLES = (HERE / "docs" / "api.md").read_text()
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
EARLY_END = {"logit_bias": {str(EOS): 100}}
USER = {"role": "user", "content": "Hi"}


def table(title):
    section = TABLES.split(f"## {title}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", section, flags=re.MULTILINE))


NATIVE_TABLE, CHAT_TABLE = table("TGI's parameters"), table("OpenAI's chat completions")
COMPLETION_TABLE = table("OpenAI's completions")

# What must show of two random sequences, whatever they are.
SHOWS = {("/generate", "best_of"): '"best_of_sequences"', (COMPLETION, "best_of"): '"completion_tokens":24'}

# For each parameter: what is asked without it, and its value. Asked for, it must show in the answer (honoured), be named in
# a 422 (refused), or change nothing (ignored).
SHARED = {
    "temperature": ({"seed": 1}, 0.3),
    "top_p": ({"seed": 1, "temperature": 5}, 0.01),
    "top_k": ({"seed": 1, "temperature": 5}, 1),
    "min_p": ({"seed": 1, "temperature": 5}, 1.0),
    "n": ({}, 2),
    "seed": ({"seed": 1, "temperature": 1}, 2),
    "presence_penalty": (EARLY_END | {"ignore_eos": True, "logit_bias": {"5": 12}}, 2),
    "frequency_penalty": (EARLY_END | {"ignore_eos": True, "logit_bias": {"5": 12}}, 2),
    "repetition_penalty": ({"logit_bias": {"5": 12}}, 50),
    "logit_bias": ({}, {"5": 100}),
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "min_tokens": (EARLY_END, 3),
    "ignore_eos": (EARLY_END, True),
    "max_tokens": ({}, 2),
    "model": ({}, "gpt-x"),
    "user": ({}, "someone"),
}
NATIVE_VALUES = {
    "best_of": ({"details": True, "temperature": 1}, 2),
    "temperature": ({"seed": 1}, 0.3),
    "repetition_penalty": ({}, 0.01),
    "frequency_penalty": ({"max_new_tokens": 50, "top_k": 1}, -2),
    "top_k": ({"seed": 1, "temperature": 5}, 1),
    "top_p": ({"seed": 1, "temperature": 5}, 0.01),
    "min_p": ({"seed": 1, "temperature": 5}, 1.0),
    "typical_p": ({"seed": 1, "temperature": 5}, 0.01),
    "do_sample": ({"seed": 1}, True),
    "max_new_tokens": ({}, 2),
    "return_full_text": ({}, True),
    "stop": ({}, None),
    "truncate": ({}, 1),
    "watermark": ({}, True),
    "details": ({}, True),
    "decoder_input_details": ({}, True),
    "seed": ({"seed": 1, "temperature": 1}, 2),
    "top_n_tokens": ({"details": True}, 2),
    "grammar": ({}, {"type": "regex", "value": "a"}),
    "adapter_id": ({}, "someone/adapter"),
}
CHAT_VALUES = SHARED | {
    "messages": ({}, [{"role": "user", "content": "Ho"}]),
    "max_completion_tokens": ({}, 2),
    "stop": ({}, None),
    "logprobs": ({}, True),
    "top_logprobs": ({"logprobs": True}, 2),
    "response_format": ({}, {"type": "json_object"}),
    "tools": ({}, [{"type": "function", "function": {"name": "f"}}]),
    "tool_choice": ({}, "required"),
    "functions": ({}, [{"name": "f"}]),
    "function_call": ({}, {"name": "f"}),
    "modalities": ({}, ["audio"]),
    "audio": ({}, {"voice": "x"}),
    "web_search_options": ({}, {}),
    "metadata": ({}, {"a": "b"}),
    "parallel_tool_calls": ({}, False),
    "prediction": ({}, {"type": "content", "content": "x"}),
    "prompt_cache_key": ({}, "x"),
    "reasoning_effort": ({}, "low"),
    "safety_identifier": ({}, "x"),
    "service_tier": ({}, "auto"),
    "store": ({}, True),
    "verbosity": ({}, "low"),
}
COMPLETION_VALUES = SHARED | {
    "prompt": ({}, "Ho"),
    "best_of": ({"temperature": 1, "ignore_eos": True}, 2),
    "echo": ({}, True),
    "logprobs": ({}, 1),
    "suffix": ({}, "end"),
    "stop": ({}, None),
}


def test_the_tables_name_every_field_that_is_known_and_each_is_tried_here():
    assert list(NATIVE_TABLE) == list(Parameters.__struct_fields__)
    assert set(ChatRequest.__struct_fields__) <= set(CHAT_TABLE)
    assert set(CompletionRequest.__struct_fields__) <= set(COMPLETION_TABLE)
    assert set(NATIVE_VALUES) == set(NATIVE_TABLE)
    assert set(CHAT_VALUES) == set(CHAT_TABLE)
    assert set(COMPLETION_VALUES) == set(COMPLETION_TABLE)
    assert set(NATIVE_TABLE.values()) | set(CHAT_TABLE.values()) == {"honoured", "refused", "ignored"}


def ask(served, route, body):
    """Status and answer, without what differs each time."""
    response = served.post(route, body)
    answer = re.sub(r'"(id|created|seed)": ?("\w*-\w*"|\d+)', "", response.get_data(as_text=True))
    return response.status_code, answer


def stop_of(served, route, body):
    """A stop string that the answer to `body` holds."""
    answer = served.post(route, body).json
    choice = answer.get("choices", [answer])[0]
    text = choice.get("generated_text") or choice.get("text") or choice["message"]["content"]
    return text[2]


DEVICE_TABLE = table("Sampling on the device")
ONLY_SAMPLED = {"seed", "best_of", "top_k", "min_p", "typical_p"}


@pytest.mark.parametrize("route", ["/generate", CHAT, COMPLETION])
def test_what_the_tables_say_of_sampling_on_the_device_is_so(serve, route):
    """Each parameter that is honoured elsewhere is tried; `top_k` with more than there is to draw from."""
    served = serve(sampling="device").get_ready()
    tables = {
        "/generate": (NATIVE_TABLE, NATIVE_VALUES),
        CHAT: (CHAT_TABLE, CHAT_VALUES),
        COMPLETION: (COMPLETION_TABLE, COMPLETION_VALUES),
    }
    said, values = tables[route]
    refused = set()
    for name in (name for name, word in said.items() if word == "honoured" and name != "decoder_input_details"):
        given = {name: 257 if name == "top_k" else ["a"] if name == "stop" else values[name][1]}
        if name == "top_logprobs":
            given["logprobs"] = True  # which is what it is refused for
        if route == "/generate":
            sampled = {"do_sample": True} if name in ONLY_SAMPLED else {}
            body = {"inputs": "Hi", "parameters": {"max_new_tokens": 2} | sampled | given}
        else:
            body = {"messages": [USER], "prompt": "Hi", "max_tokens": 4} | given
        response = served.post(route, body)
        if response.status_code == 422:
            assert "needs SAMPLING=host: this server samples on the device" in response.get_data(as_text=True)
            refused.add(name)
    assert refused == set(DEVICE_TABLE) & {name for name, word in said.items() if word == "honoured"}
    assert set(DEVICE_TABLE.values()) == {"refused"}
    served.assert_idle()


CASES = [
    *(("/generate", name, said, *NATIVE_VALUES[name]) for name, said in NATIVE_TABLE.items()),
    *((CHAT, name, said, *CHAT_VALUES[name]) for name, said in CHAT_TABLE.items()),
    *((COMPLETION, name, said, *COMPLETION_VALUES[name]) for name, said in COMPLETION_TABLE.items()),
]


@pytest.mark.parametrize(("route", "name", "said", "besides", "value"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_what_the_tables_say_of_a_parameter_is_so(served, route, name, said, besides, value):
    def body(**more):
        if route == "/generate":
            return {"inputs": "Hi", "parameters": {"max_new_tokens": 12} | besides | more}
        prompt = {"messages": [USER]} if route == CHAT else {"prompt": "Hi"}
        return prompt | {"max_tokens": 12, "temperature": 0} | besides | more

    if name == "stop":
        value = [stop_of(served, route, body())]
    status, without = ask(served, route, body())
    assert status == 200, without
    status, answer = ask(served, route, body(**{name: value}))
    if said == "refused":
        assert status == 422
        assert f"`{name}`" in answer or f'"param":"{name}"' in answer
    else:
        assert status == 200, answer
        assert (answer == without) == (said == "ignored")
        shows = SHOWS.get((route, name), "")
        assert shows in answer and (not shows or shows not in without)
