"""`/v1/chat/completions`: whole answers and streams say the same, and what they say of themselves is true."""

import numpy as np
import pytest
from fakes.model import EOS, next_logprobs
from fakes.tokenizer import VOCABULARY
from openai_api import CHAT, MESSAGES, SAMPLED, UNCACHED, chunks, streamed_text, whole
from served import Served


def test_a_chat_is_answered_by_what_follows_its_template(served):
    answer = whole(served, CHAT, MESSAGES)
    prompt = "u:Hi;a:"
    expected = served.expected(prompt, 12)
    assert list(answer) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "m"
    reason = "stop" if expected[-1] == EOS else "length"
    message = {"role": "assistant", "content": served.tokenizer.decode(expected)}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(expected), "total_tokens": len(prompt) + len(expected)}
    assert answer["usage"] == usage | UNCACHED


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


def test_log_probabilities_of_a_chat_are_the_models_own_and_spell_its_bytes(served):
    body = MESSAGES | SAMPLED | {"logprobs": True, "top_logprobs": 3}
    answer = whole(served, CHAT, body)
    choice = answer["choices"][0]
    tokens = served.tokenizer.encode("u:Hi;a:").ids
    told = choice["logprobs"]["content"]
    assert len(told) == answer["usage"]["completion_tokens"]
    spelled = b"".join(bytes(token["bytes"] or []) for token in told)
    assert spelled.decode(errors="replace") == choice["message"]["content"]
    for token in told:
        logprobs = next_logprobs(tokens, VOCABULARY)
        top = [entry["logprob"] for entry in token["top_logprobs"]]
        assert top == pytest.approx(sorted(logprobs, reverse=True)[:3], abs=1e-5)
        near = int(np.abs(logprobs - token["logprob"]).argmin())
        assert logprobs[near] == pytest.approx(token["logprob"], abs=1e-5)
        assert (token["bytes"] is None) == (near == EOS)
        tokens = [*tokens, near]
    stream = chunks(served, CHAT, body)
    pieces = [c["logprobs"]["content"] for chunk in stream for c in chunk["choices"] if c["logprobs"]]
    assert [token for piece in pieces for token in piece] == told


def test_no_part_of_a_stop_string_shows_in_the_bytes_of_log_probabilities(served):
    full = whole(served, CHAT, MESSAGES)["choices"][0]["message"]["content"]
    for start in range(len(full) - 2):
        stop = full[start : start + 2]
        choice = whole(served, CHAT, MESSAGES | {"stop": stop, "logprobs": True})["choices"][0]
        spelled = b"".join(bytes(token["bytes"] or []) for token in choice["logprobs"]["content"])
        assert spelled.decode(errors="replace") == choice["message"]["content"] == full.split(stop)[0]


def test_the_next_turn_of_a_chat_goes_on_from_a_snapshot_between_its_messages(tmp_path):
    served = Served(tmp_path, snapshots=8).get_ready()
    try:
        system, first = {"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}
        whole(served, CHAT, {"messages": [system, first], "max_tokens": 2})
        second = {"messages": [system, first, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "Bye"}]}
        answer = whole(served, CHAT, second | {"max_tokens": 2, "temperature": 0})
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": len("s:Be brief;u:Hi;")}
        text = served.tokenizer.decode(served.expected("s:Be brief;u:Hi;a:Yo;u:Bye;a:", 2))
        assert answer["choices"][0]["message"]["content"] == text
        other = whole(served, CHAT, {"messages": [system, {"role": "user", "content": "Go"}], "max_tokens": 2})
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == len("s:Be brief;u:")
    finally:
        served.close()
