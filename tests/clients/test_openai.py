"""openai's own client against the routes under /v1."""

import asyncio
from itertools import islice

import openai
import pytest
from demo_server import (
    ANSWER,
    ANSWER_TOKENS,
    CHAT,
    CHAT_ANSWER,
    CHAT_ANSWER_TOKENS,
    CHAT_TOKENS,
    QUESTION,
    QUESTION_TOKENS,
    serving,
)

MODEL = "neuron-textgen/demo"
OTHER_QUESTION = "What is AWS Inferentia?"


def connect(url, key="none", **settings):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60, **settings)


@pytest.fixture(scope="module")
def client(url):
    with connect(url) as client:
        yield client


@pytest.fixture
def chat(client):
    """Asks the one question without sampling."""

    def ask(**parameters):
        return client.chat.completions.create(**({"model": MODEL, "messages": CHAT, "temperature": 0} | parameters))

    return ask


@pytest.fixture
def complete(client):
    """Completes the one prompt without sampling."""

    def ask(**parameters):
        return client.completions.create(**({"model": MODEL, "prompt": QUESTION, "temperature": 0} | parameters))

    return ask


def test_the_one_model_is_listed_and_found_by_its_name(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_an_unknown_model_is_not_found_and_the_error_names_the_one_there_is(client):
    with pytest.raises(openai.NotFoundError, match=MODEL) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_chat_is_answered_with_its_usage(chat):
    completion = chat()
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", CHAT_ANSWER, "stop")
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (CHAT_TOKENS, CHAT_ANSWER_TOKENS)
    assert usage.total_tokens == CHAT_TOKENS + CHAT_ANSWER_TOKENS
    assert (completion.object, completion.model) == ("chat.completion", MODEL)
    assert completion.id.startswith("chatcmpl-")


def test_any_name_is_served_by_the_one_model(chat):
    assert chat(model="gpt-4").choices[0].message.content == CHAT_ANSWER


def test_content_may_be_a_list_of_texts(chat):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "Deep Learning?"}]
    assert chat(messages=[{"role": "user", "content": parts}]).choices[0].message.content == CHAT_ANSWER


def test_a_streamed_chat_comes_in_pieces_and_ends_with_its_reason(chat):
    with chat(stream=True) as stream:
        *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) >= CHAT_ANSWER_TOKENS - 1
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == CHAT_ANSWER
    assert last.choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_a_stream_that_is_left_early_harms_nobody(chat):
    with chat(stream=True) as stream:
        assert len(list(islice(stream, 3))) == 3
    assert chat().choices[0].message.content == CHAT_ANSWER


def test_usage_comes_after_the_last_piece_of_a_stream(chat):
    *chunks, last = chat(stream=True, stream_options={"include_usage": True})
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (CHAT_TOKENS, CHAT_ANSWER_TOKENS)


def test_the_stream_helper_gives_the_completion_that_the_plain_call_gives(client, chat):
    with client.chat.completions.stream(model=MODEL, messages=CHAT, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == chat().choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_logprobs_come_with_the_likeliest_tokens_whole_or_streamed(chat):
    asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    whole = chat(**asked).choices[0]
    tokens = whole.logprobs.content
    assert "".join(token.token for token in tokens) == whole.message.content
    assert bytes(byte for token in tokens for byte in token.bytes).decode() == whole.message.content
    assert all(token.top_logprobs[0].token == token.token for token in tokens), "without sampling the likeliest is taken"
    assert all(0 >= token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob for token in tokens)
    streamed = [choice.logprobs for chunk in chat(stream=True, **asked) for choice in chunk.choices if choice.logprobs]
    # Batches of other sizes may round the last digits another way.
    assert [token.token for logprobs in streamed for token in logprobs.content] == [token.token for token in tokens]
    assert [token.logprob for logprobs in streamed for token in logprobs.content] == pytest.approx(
        [token.logprob for token in tokens], abs=1e-3
    )


def test_n_gives_as_many_choices_whole_or_streamed(chat):
    completion = chat(n=2)
    assert [(choice.index, choice.message.content) for choice in completion.choices] == [(0, CHAT_ANSWER), (1, CHAT_ANSWER)]
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (CHAT_TOKENS, 2 * CHAT_ANSWER_TOKENS)
    texts = ["", ""]
    for chunk in chat(n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [CHAT_ANSWER, CHAT_ANSWER]


@pytest.mark.parametrize("stop", [" neural", [" neural", " layers"]], ids=["text", "list"])
def test_a_chat_ends_before_its_stop_text(chat, stop):
    expected = CHAT_ANSWER[: CHAT_ANSWER.index(" neural")]
    choice = chat(stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected, "stop")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat(stop=stop, stream=True)) == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_cuts_the_answer_and_is_the_reason(chat, name):
    completion = chat(**{name: 3})
    assert (completion.choices[0].finish_reason, completion.usage.completion_tokens) == ("length", 3)


def test_a_seed_gives_the_same_answer_again_and_another_seed_another(chat):
    def ask(seed):
        return chat(temperature=1.8, seed=seed, max_tokens=16).choices[0].message.content

    assert ask(1) == ask(1)
    assert len({ask(1), ask(2), ask(3)}) > 1


def test_what_does_not_fit_is_a_bad_request_with_openais_code(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as caught:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Why? " * 2000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_limit_beyond_the_window_is_cut(chat):
    assert chat(max_tokens=32_000).choices[0].message.content == CHAT_ANSWER


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"temperature": -1}, "temperature"), ({"top_p": 7}, "top_p"), ({"n": 0}, "n")],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_wrong_value_is_a_bad_request_and_the_message_names_it(chat, wrong, name, stream):
    with pytest.raises(openai.BadRequestError, match=f"Input validation error: .*`{name}`") as caught:
        chat(stream=stream, **wrong)
    assert caught.value.body["message"].startswith("Input validation error")
    assert caught.value.type == "invalid_request_error"


def test_a_busy_server_is_a_rate_limit_error(chat, busy):
    with pytest.raises(openai.RateLimitError, match="Model is overloaded"):
        chat(n=2, temperature=1)


def test_a_completion_goes_on_where_the_prompt_ends(complete):
    completion = complete(max_tokens=100)
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == (ANSWER, "stop")
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (QUESTION_TOKENS, ANSWER_TOKENS)


def test_a_list_of_prompts_gets_a_choice_each_in_their_order(complete):
    both = complete(prompt=[OTHER_QUESTION, QUESTION], max_tokens=100).choices
    assert [choice.index for choice in both] == [0, 1]
    assert both[0].text.startswith(" AWS Inferentia is")
    assert both[1].text == ANSWER


def test_echo_puts_the_prompt_in_front_with_its_logprobs(complete):
    choice = complete(echo=True, logprobs=2, max_tokens=3).choices[0]
    assert choice.text.startswith(QUESTION)
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    assert len(told.tokens) == QUESTION_TOKENS + 3
    assert [choice.text[offset:].startswith(token) for offset, token in zip(told.text_offset, told.tokens)] == [True] * 11
    assert told.token_logprobs[0] is None and all(logprob <= 0 for logprob in told.token_logprobs[1:])
    assert told.top_logprobs[0] is None and all(2 <= len(top) <= 3 for top in told.top_logprobs[1:])  # and the token itself


def test_a_prompt_can_be_scored_without_generating(complete):
    choice = complete(echo=True, logprobs=1, max_tokens=0).choices[0]
    assert choice.text == QUESTION
    assert len(choice.logprobs.token_logprobs) == QUESTION_TOKENS


def test_a_streamed_completion_is_the_same_text(complete):
    *chunks, last = complete(stream=True, max_tokens=100)
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert last.choices[0].finish_reason == "stop"


def test_the_async_client_streams_several_answers_at_once(url):
    async def stream(client):
        chunks = await client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(stream(client) for _ in range(3)))

    assert asyncio.run(ask()) == [CHAT_ANSWER] * 3


class TestWithAnApiKey:
    @pytest.fixture(scope="class")
    def guarded_url(self):
        with serving(API_KEY="secret") as url:
            yield url

    def test_the_right_key_opens_every_route(self, guarded_url):
        with connect(guarded_url, key="secret") as client:
            assert client.models.list().data[0].id == MODEL
            completion = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0)
            assert completion.choices[0].message.content == CHAT_ANSWER

    @pytest.mark.parametrize("key", ["wrong", "Secret", "secret2"])
    def test_any_other_key_is_an_authentication_error(self, guarded_url, key):
        with connect(guarded_url, key=key) as client:
            with pytest.raises(openai.AuthenticationError, match="Unauthorized") as caught:
                client.chat.completions.create(model=MODEL, messages=CHAT)
            assert caught.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
