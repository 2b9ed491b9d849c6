"""What each API's clients read: whole answers and streams say the same, and what they say of themselves is true."""

import json

import numpy as np
import pytest
from fakes.model import EOS, next_logits
from fakes.tokenizer import VOCABULARY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import WINDOW, events

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}
SAMPLED = {"temperature": 0.9, "seed": 11}
MESSAGES = {"messages": [USER], "max_tokens": 12, "temperature": 0}
UNCACHED = {"prompt_tokens_details": {"cached_tokens": 0}}
PROMPT = {"prompt": "Hi", "max_tokens": 12, "temperature": 0}

several = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def whole(served, route, body):
    response = served.post(route, body)
    assert response.status_code == 200, response.json
    return response.json


def chunks(served, route, body):
    """The events of an OpenAI stream, without the last word."""
    response = served.post(route, body | {"stream": True})
    text = response.get_data(as_text=True)
    assert response.status_code == 200, text
    assert response.content_type == "text/event-stream"
    assert text.endswith("data: [DONE]\n\n")
    parts = text.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def refusal(served, route, body, status=422):
    response = served.post(route, body)
    assert response.status_code == status, response.get_data()
    assert response.content_type == "application/json"
    assert list(response.json) == ["error"]
    error = response.json["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


def streamed_text(stream, index=0):
    key = {"chat.completion.chunk": lambda c: c["delta"].get("content", ""), "text_completion": lambda c: c["text"]}
    return "".join(key[chunk["object"]](c) for chunk in stream for c in chunk["choices"] if c["index"] == index)


def log_softmax(tokens):
    logits = next_logits(tokens, VOCABULARY).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


# Chat


def test_a_chat_is_answered_by_what_follows_its_template(served):
    answer = whole(served, CHAT, MESSAGES)
    prompt = "u:Hi;a:"
    expected = served.expected(prompt, 12)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "m"
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["message"] == {"role": "assistant", "content": served.tokenizer.decode(expected)}
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == ("stop" if expected[-1] == EOS else "length")
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(expected), "total_tokens": len(prompt) + len(expected)}
    assert answer["usage"] == usage | UNCACHED


def test_the_parts_of_a_content_are_put_together(served):
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    body = MESSAGES | {"messages": [{"role": "user", "content": parts}]}
    assert whole(served, CHAT, body)["choices"] == whole(served, CHAT, MESSAGES)["choices"]


def test_an_assistant_message_at_the_end_is_continued(served):
    body = MESSAGES | {"messages": [USER, {"role": "assistant", "content": "Well "}]}
    text = whole(served, CHAT, body)["choices"][0]["message"]["content"]
    assert text == served.tokenizer.decode(served.expected("u:Hi;a:Well", 12))


def test_a_streamed_chat_says_the_role_once_then_the_text_then_why_it_ended(served):
    stream = chunks(served, CHAT, MESSAGES)
    assert len({chunk["id"] for chunk in stream}) == 1
    assert {chunk["object"] for chunk in stream} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in stream]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(list(choice["delta"]) == ["content"] for choice in choices[1:-1])
    assert choices[-1]["delta"] == {"content": ""}, "loops that print it must not print None"
    answer = whole(served, CHAT, MESSAGES)["choices"][0]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [answer["finish_reason"]]
    assert streamed_text(stream) == answer["message"]["content"]
    assert all(chunk["usage"] is None for chunk in stream)


@pytest.mark.parametrize(("route", "body"), [(CHAT, MESSAGES), (COMPLETION, PROMPT)])
def test_usage_comes_last_in_a_stream_when_it_is_asked_for(served, route, body):
    stream = chunks(served, route, body | {"stream_options": {"include_usage": True, "unknown": 1}})
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"] == whole(served, route, body)["usage"]
    assert all(chunk["usage"] is None for chunk in stream[:-1])
    always = chunks(served, route, body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [chunk["usage"]["completion_tokens"] for chunk in always]
    assert counts == sorted(counts)
    assert always[-1]["usage"] == stream[-1]["usage"]


@pytest.mark.parametrize(("route", "body"), [(CHAT, MESSAGES), (COMPLETION, PROMPT)])
def test_n_choices_have_a_random_stream_each_which_follows_from_the_seed(served, route, body):
    answer = whole(served, route, body | SAMPLED | {"n": 3})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    alone = [whole(served, route, body | SAMPLED | {"seed": 11 + n})["choices"][0] for n in range(3)]
    assert [choice | {"index": 0} for choice in answer["choices"]] == alone
    assert answer["usage"]["prompt_tokens"] == whole(served, route, body)["usage"]["prompt_tokens"]
    stream = chunks(served, route, body | SAMPLED | {"n": 3})
    text = {"chat.completion": lambda c: c["message"]["content"], "text_completion": lambda c: c["text"]}[answer["object"]]
    assert [streamed_text(stream, n) for n in range(3)] == [text(choice) for choice in answer["choices"]]
    ends = [c["index"] for chunk in stream for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize(("route", "body"), [(CHAT, MESSAGES), (COMPLETION, PROMPT)])
@given(start=st.integers(0, 10), length=st.integers(1, 5), as_list=st.booleans())
@several
def test_a_stop_string_ends_the_text_and_no_part_of_it_shows(served, route, body, start, length, as_list):
    full = streamed_text(chunks(served, route, body))
    stop = full[start : start + length] or "never"
    body = body | {"stop": [stop] if as_list else stop}
    stream = chunks(served, route, body)
    assert streamed_text(stream) == full.split(stop)[0]
    answer = whole(served, route, body)["choices"][0]
    assert (answer.get("text") or answer.get("message", {}).get("content", "")) == full.split(stop)[0]
    assert answer["finish_reason"] == stream[-1]["choices"][0]["finish_reason"]
    assert stop not in full or answer["finish_reason"] == "stop"


def test_log_probabilities_of_a_chat_are_the_models_own_and_spell_its_bytes(served):
    body = MESSAGES | SAMPLED | {"logprobs": True, "top_logprobs": 3}
    answer = whole(served, CHAT, body)
    choice, tokens = answer["choices"][0], served.tokenizer.encode("u:Hi;a:").ids
    told = choice["logprobs"]["content"]
    assert len(told) == answer["usage"]["completion_tokens"]
    spelled = b"".join(bytes(token["bytes"] or []) for token in told)
    assert spelled.decode(errors="replace") == choice["message"]["content"]
    for token in told:
        logprobs = log_softmax(tokens)
        top = [entry["logprob"] for entry in token["top_logprobs"]]
        assert top == pytest.approx(sorted(logprobs, reverse=True)[:3], abs=1e-5)
        near = int(np.abs(logprobs - token["logprob"]).argmin())
        assert logprobs[near] == pytest.approx(token["logprob"], abs=1e-5)
        assert (token["bytes"] is None) == (near == EOS)
        tokens = [*tokens, near]
    stream = chunks(served, CHAT, body)
    pieces = [c["logprobs"]["content"] for chunk in stream for c in chunk["choices"] if c["logprobs"]]
    assert [token for piece in pieces for token in piece] == told


REFUSED_IN_CHAT = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "functions": [{"name": "f"}],
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "response_format": {"type": "json_schema"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "web_search_options": {},
    "top_logprobs": 2,
    "n": 0,
    "temperature": -1,
    "top_p": 1.5,
    "presence_penalty": 2.5,
    "frequency_penalty": -3,
    "logit_bias": {"0" * 20 + str(2**64 - 1): 1},
    "max_tokens": 0,
    "max_completion_tokens": 0,
    "stop": ["a"] * 5,
    "min_tokens": 13,
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("field", REFUSED_IN_CHAT)
def test_what_a_chat_cannot_honour_is_refused_by_name_before_the_first_byte(served, field, streams):
    error = refusal(served, CHAT, MESSAGES | {field: REFUSED_IN_CHAT[field], "stream": streams})
    assert f"`{field}`" in error["message"]
    assert (error["param"], error["type"], error["code"]) == (field, "invalid_request_error", "validation")


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []},
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"user": "u", "model": "gpt-x", "store": True, "max_retries": 3, "metadata": {"a": "b"}},
        {"stop": None, "seed": None, "logit_bias": None, "stream_options": None, "tools": None},
        {"max_tokens": 50, "max_completion_tokens": 12},
    ],
)
def test_what_asks_for_nothing_changes_nothing(served, harmless):
    assert whole(served, CHAT, MESSAGES | harmless)["choices"] == whole(served, CHAT, MESSAGES)["choices"]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "`messages` cannot be empty"),
        ([{"role": "user"}], "`messages[0]` needs `content`"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url is not supported"),
        ([{"role": "forbidden", "content": "x"}], "Template error: no such role"),
        ([{"content": "x"}], "missing required field `role`"),
        ("Hi", "messages: Expected `array`, got `str`"),
    ],
)
def test_messages_that_cannot_be_told_are_refused_with_the_reason(served, messages, told):
    assert told in refusal(served, CHAT, MESSAGES | {"messages": messages})["message"]


def test_a_model_without_a_template_says_so(served):
    served.seen.text = served.seen.text._replace(template=None)
    error = refusal(served, CHAT, MESSAGES)
    assert (error["message"], error["code"]) == ("Template error: template not found", "template_error")


# Parameters that OpenAI has and TGI has not


def test_a_logit_bias_decides_which_token_comes(served):
    (token,) = served.tokenizer.encode("z").ids
    answer = whole(served, COMPLETION, PROMPT | {"logit_bias": {str(token): 100}})
    assert answer["choices"][0]["text"] == "z" * 12


def test_an_end_that_is_ignored_or_comes_too_early_does_not_end_the_text(served):
    at_once = PROMPT | {"logit_bias": {str(EOS): 100}}
    answer = whole(served, COMPLETION, at_once)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
    assert answer["usage"]["completion_tokens"] == 1
    answer = whole(served, COMPLETION, at_once | {"ignore_eos": True})
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (12, "length")
    answer = whole(served, COMPLETION, at_once | {"min_tokens": 5})
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (6, "stop")


def test_penalties_are_of_the_answer_and_as_strong_as_asked(served):
    (token,) = served.tokenizer.encode("z").ids
    always = PROMPT | {"logit_bias": {str(token): 25}, "max_tokens": 24}
    assert whole(served, COMPLETION, always)["choices"][0]["text"] == "z" * 24
    assert whole(served, COMPLETION, always | {"presence_penalty": 2})["choices"][0]["text"] == "z" * 24
    with_frequency = whole(served, COMPLETION, always | {"frequency_penalty": 2})["choices"][0]["text"]
    assert with_frequency.startswith("z" * 5), "25 is not spent by the first few"
    assert with_frequency != "z" * 24


def test_openai_samples_unless_the_temperature_is_nought(served):
    greedy = whole(served, COMPLETION, PROMPT)["choices"][0]["text"]
    assert greedy == served.tokenizer.decode(served.expected("Hi", 12))
    free = {"prompt": "Hi", "max_tokens": 12}
    assert len({whole(served, COMPLETION, free)["choices"][0]["text"] for _ in range(5)}) > 1
    assert (
        whole(served, COMPLETION, free | {"seed": -1})["choices"] == whole(served, COMPLETION, free | {"seed": -1})["choices"]
    )


# Completions


def test_several_prompts_are_answered_in_their_order(served):
    answer = whole(served, COMPLETION, PROMPT | {"prompt": ["Hi", "Ho", "Hi"]})
    expected = [served.tokenizer.decode(served.expected(text, 12)) for text in ("Hi", "Ho", "Hi")]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 6
    stream = chunks(served, COMPLETION, PROMPT | {"prompt": ["Hi", "Ho", "Hi"]})
    assert [streamed_text(stream, n) for n in range(3)] == expected


def test_a_prompt_may_come_as_token_ids(served):
    ids = served.tokenizer.encode("Hi").ids
    told = whole(served, COMPLETION, PROMPT)["choices"]
    assert whole(served, COMPLETION, PROMPT | {"prompt": ids})["choices"] == told
    assert whole(served, COMPLETION, PROMPT | {"prompt": [ids]})["choices"] == told
    assert whole(served, COMPLETION, PROMPT | {"prompt": [ids, ids]})["choices"][1]["text"] == told[0]["text"]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "Empty array detected. Do not use an empty array for the prompt."),
        ("", "`prompt` cannot be empty"),
        (["a", ""], "`prompt` cannot be empty"),
        ([[]], "`prompt` cannot be empty"),
        (["a"] * 33, "Number of prompts exceeds the maximum allowed batch size of 32"),
        (
            [1, VOCABULARY],
            f"`prompt` holds token {VOCABULARY}, but the model's vocabulary has the tokens 0 to {VOCABULARY - 1}",
        ),
        ([1, -1], "`prompt` holds token -1"),
        ([1, "a"], "not a mixture"),
        ([[1], "a"], "not a mixture"),
        ([1.5], "Expected"),
        (None, "prompt: Expected"),
    ],
)
def test_prompts_that_cannot_be_are_refused(served, prompt, told):
    assert told in refusal(served, COMPLETION, PROMPT | {"prompt": prompt})["message"]


def test_what_does_not_fit_is_told_in_the_names_of_the_route(served):
    error = refusal(served, COMPLETION, PROMPT | {"max_tokens": WINDOW}, 400)
    told = f"`prompt` tokens + `max_tokens` must be <= {WINDOW}. Given: 2 `prompt` tokens and {WINDOW} `max_tokens`"
    limit = f"This model's maximum context length is {WINDOW} tokens: "
    assert (error["message"], error["code"], error["param"]) == (limit + told, "context_length_exceeded", "prompt")
    error = refusal(served, CHAT, MESSAGES | {"max_completion_tokens": WINDOW}, 400)
    assert "`messages` tokens + `max_completion_tokens`" in error["message"]


def test_echo_puts_the_prompt_before_the_text(served):
    plain = whole(served, COMPLETION, PROMPT)["choices"][0]["text"]
    for prompt in ("Hi", served.tokenizer.encode("Hi").ids):
        body = PROMPT | {"echo": True, "prompt": prompt}
        assert whole(served, COMPLETION, body)["choices"][0]["text"] == "Hi" + plain
        assert streamed_text(chunks(served, COMPLETION, body)) == "Hi" + plain


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_of_a_completion_tell_of_prompt_and_answer(served, top):
    body = PROMPT | {"echo": True, "logprobs": top, "prompt": "Hello"}
    answer = whole(served, COMPLETION, body)
    text, told = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
    assert len(told["tokens"]) == answer["usage"]["total_tokens"]
    assert told["token_logprobs"][0] is None
    ids = served.tokenizer.encode("Hello").ids + served.expected("Hello", 12)
    expected = [log_softmax(ids[:n])[ids[n]] for n in range(1, len(ids))]
    assert told["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    for token, offset in zip(told["tokens"], told["text_offset"]):
        assert text.startswith(token, offset) or token == "<eos>"
    if top:
        assert told["top_logprobs"][0] is None
        assert all(top <= len(entry) <= top + 1 for entry in told["top_logprobs"][1:])
    else:
        assert told["top_logprobs"] is None
    pieces = [c["logprobs"] for chunk in chunks(served, COMPLETION, body) for c in chunk["choices"] if c["logprobs"]]
    for column in ("tokens", "token_logprobs", "text_offset"):
        assert [value for piece in pieces for value in piece[column]] == told[column]


def test_a_prompt_may_be_scored_without_an_answer(served):
    answer = whole(served, COMPLETION, {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 1})
    assert answer["choices"][0]["text"] == "Hello"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 5
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5} | UNCACHED
    assert "`max_tokens`" in refusal(served, COMPLETION, {"prompt": "Hello", "max_tokens": 0})["message"]


def test_the_best_of_several_is_the_one_that_the_model_finds_likeliest(served):
    body = PROMPT | SAMPLED | {"logprobs": 0}

    def mean(choice):
        return sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])

    candidates = whole(served, COMPLETION, body | {"n": 2})["choices"]
    (best,) = whole(served, COMPLETION, body | {"best_of": 2})["choices"]
    assert best | {"index": 0} == max(candidates, key=mean) | {"index": 0}
    assert "`best_of`" in refusal(served, COMPLETION, body | {"best_of": 2, "stream": True})["message"]
    assert "`best_of`" in refusal(served, COMPLETION, body | {"best_of": 3})["message"]
    assert "`best_of`" in refusal(served, COMPLETION, body | {"n": 3, "best_of": 2})["message"]


@pytest.mark.parametrize("token", ["0" * 20 + "9" * 30, "0" * 4000 + "1", "9" * 30, "1000", "-1", "1.0", "", " 1", "٣"])
def test_a_bias_of_what_is_no_token_is_refused_and_harms_nobody(served, token):
    error = refusal(served, COMPLETION, PROMPT | {"logit_bias": {token: 1}})
    assert error["param"] == "logit_bias"
    assert whole(served, COMPLETION, PROMPT)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (CHAT, MESSAGES | {"logprobs": 1}, "logprobs"),
        (CHAT, MESSAGES | {"stream": "true"}, "stream"),
        (CHAT, MESSAGES | {"seed": 1.5}, "seed"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (COMPLETION, PROMPT | {"prompt": None}, "prompt"),
        (COMPLETION, PROMPT | {"prompt": []}, "prompt"),
        (COMPLETION, PROMPT | {"prompt": ["a"] * 33}, "prompt"),
        (COMPLETION, PROMPT | {"logit_bias": [1]}, "logit_bias"),
        (COMPLETION, b"{", None),
    ],
)
def test_an_error_names_the_parameter_that_it_is_about(served, route, body, param):
    response = served.post(route, body)
    assert response.json["error"]["param"] == param


def test_of_several_tokens_with_the_same_text_the_likeliest_is_told(served):
    prompt = "☀☀"
    told = whole(served, COMPLETION, {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 5})
    ids = served.tokenizer.encode(prompt).ids
    for n, entry in list(enumerate(told["choices"][0]["logprobs"]["top_logprobs"]))[1 : len(ids)]:
        logprobs = log_softmax(ids[:n])
        best = sorted(logprobs, reverse=True)[:5]
        expected = best if logprobs[ids[n]] >= best[-1] else [*best, logprobs[ids[n]]]
        assert sorted(entry.values(), reverse=True) == pytest.approx(expected, abs=1e-5)
    assert any(key.startswith("bytes:\\x") for key in entry)


def test_offsets_count_what_the_echo_shows_of_special_tokens(served):
    body = {"prompt": "<eos>Hi", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
    choice = whole(served, COMPLETION, body)["choices"][0]
    assert choice["text"].startswith("<eos>Hi")
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]):
        assert choice["text"].startswith(token, offset)


def test_no_part_of_a_stop_string_shows_in_the_bytes_of_log_probabilities(served):
    full = whole(served, CHAT, MESSAGES)["choices"][0]["message"]["content"]
    for start in range(len(full) - 2):
        stop = full[start : start + 2]
        choice = whole(served, CHAT, MESSAGES | {"stop": stop, "logprobs": True})["choices"][0]
        spelled = b"".join(bytes(token["bytes"] or []) for token in choice["logprobs"]["content"])
        assert spelled.decode(errors="replace") == choice["message"]["content"] == full.split(stop)[0]


def test_a_suffix_is_refused_by_name(served):
    error = refusal(served, COMPLETION, PROMPT | {"suffix": "end"})
    assert error["message"] == "Suffix is not supported and can be achieved by preprocessing the prompt."
    assert error["param"] == "suffix"


# TGI's own


def test_best_of_tells_the_likeliest_and_shows_the_others(served):
    parameters = {"best_of": 2, "temperature": 0.9, "max_new_tokens": 8, "details": True}
    answer = whole(served, "/generate", {"inputs": "Hi", "parameters": parameters})
    details = answer["details"]
    (other,) = details["best_of_sequences"]

    def mean(told):
        return sum(token["logprob"] for token in told["tokens"]) / len(told["tokens"])

    assert mean(details) >= mean(other)
    assert details["seed"] != other["seed"]
    again = {"temperature": 0.9, "max_new_tokens": 8, "seed": other["seed"]}
    assert whole(served, "/generate", {"inputs": "Hi", "parameters": again})["generated_text"] == other["generated_text"]


def test_decoder_input_details_are_the_models_log_probabilities_of_the_prompt(served):
    parameters = {"decoder_input_details": True, "max_new_tokens": 2}
    prefill = whole(served, "/generate", {"inputs": "Hello", "parameters": parameters})["details"]["prefill"]
    ids = served.tokenizer.encode("Hello").ids
    assert [token["id"] for token in prefill] == ids
    assert [token["text"] for token in prefill] == list("Hello")
    assert prefill[0]["logprob"] is None
    expected = [log_softmax(ids[:n])[ids[n]] for n in range(1, len(ids))]
    assert [token["logprob"] for token in prefill[1:]] == pytest.approx(expected, abs=1e-5)
    kept = whole(served, "/generate", {"inputs": "Hello", "parameters": parameters | {"truncate": 2}})["details"]["prefill"]
    assert [token["id"] for token in kept] == ids[-2:]


@pytest.mark.parametrize("route", ["/", "/v1", "/invocations"])
def test_the_root_answers_in_a_list_with_the_prompt_unless_told_not_to(served, route):
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}
    text = whole(served, "/generate", body)["generated_text"]
    assert whole(served, route, body) == [{"generated_text": "Hi" + text}]
    body["parameters"]["return_full_text"] = False
    assert whole(served, route, body) == [{"generated_text": text}]
    stream = events(served.post(route, body | {"stream": True}))
    assert stream[-1]["generated_text"] == text
    assert stream == events(served.post("/generate_stream", body))


def test_an_invocation_is_whichever_request_it_looks_like(served):
    chat = served.post("/invocations", MESSAGES)
    assert chat.json["choices"] == whole(served, CHAT, MESSAGES)["choices"]
    completion = served.post("/invocations", PROMPT)
    assert completion.json["choices"] == whole(served, COMPLETION, PROMPT)["choices"]
    assert served.post("/invocations", MESSAGES | {"n": 0}).json["error"]["param"] == "n", "its errors are OpenAI's too"
    neither = served.post("/invocations", {"text": "Hi"})
    assert (neither.status_code, neither.json["error_type"]) == (422, "validation")
    assert "did not match any variant" in neither.json["error"]


def test_vertex_predicts_a_text_for_each_instance(served):
    greedy = {"max_new_tokens": 5}
    instances = [{"inputs": "Hi", "parameters": greedy}, MESSAGES, {"inputs": "Ho", "parameters": greedy}]
    predictions = whole(served, "/vertex", {"instances": instances})["predictions"]
    assert predictions == [
        whole(served, "/generate", instances[0])["generated_text"],
        whole(served, CHAT, MESSAGES)["choices"][0]["message"]["content"],
        whole(served, "/generate", instances[2])["generated_text"],
    ]
    empty = served.post("/vertex", {"instances": []})
    assert (empty.status_code, empty.json["error_type"]) == (422, "Input validation error")
    wrong = served.post("/vertex", {"instances": [instances[0], {"inputs": "", "parameters": greedy}]})
    assert (wrong.status_code, wrong.json["error"]) == (422, "Input validation error: `inputs` cannot be empty")
    assert served.post("/vertex", {"instances": [instances[0]] * 33}).json["error_type"] == "batch size exceeded"
    for cannot in ({"n": 2}, {"stream": True}):
        refused = served.post("/vertex", {"instances": [MESSAGES | cannot]})
        assert (refused.status_code, f"`{next(iter(cannot))}`" in refused.json["error"]) == (422, True)


def test_the_route_of_the_ray_blueprint_gives_prompt_and_answer_in_a_list(served):
    text = whole(served, "/generate", {"inputs": "Hi there"})["generated_text"]
    response = served.client.get("/infer?sentence=Hi%20there")
    assert (response.status_code, response.json) == (200, ["Hi there" + text])
    for path in ("/infer", "/infer?sentence="):
        assert "`sentence` cannot be empty" in served.client.get(path).json["error"]


def test_tokenize_tells_where_each_token_stands(served):
    text = "Hé!"
    tokens = whole(served, "/tokenize", {"inputs": text, "parameters": {"truncate": 1}})
    assert [token["id"] for token in tokens] == served.tokenizer.encode(text).ids
    assert (tokens[0]["text"], tokens[0]["start"], tokens[0]["stop"]) == ("H", 0, 1)
    assert (tokens[-1]["text"], tokens[-1]["start"], tokens[-1]["stop"]) == ("!", 3, 4)
    assert whole(served, "/tokenize", {"inputs": ""}) == []


def test_chat_tokenize_shows_the_text_that_a_chat_becomes(served):
    answer = whole(served, "/chat_tokenize", {"messages": [USER]})
    assert answer["templated_text"] == "u:Hi;a:"
    assert [token["text"] for token in answer["tokenize_response"]] == list("u:Hi;a:")


def test_the_model_is_listed_under_its_name(served):
    card = served.client.get("/v1/models").json["data"][0]
    assert (card["id"], card["object"], card["owned_by"]) == ("m", "model", "m")
    assert served.client.get("/v1/models/m").json == card
    missing = served.client.get("/v1/models/other")
    assert (missing.status_code, missing.json["error"]["code"]) == (404, "model_not_found")
