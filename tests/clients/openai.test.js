// openai-node against the routes under /v1. test_javascript.py runs it.
"use strict";

const assert = require("node:assert/strict");
const { test } = require("node:test");
const OpenAI = require("openai");

const { ANSWER, CHAT_ANSWER, KEY, QUESTION, SERVER } = process.env;
const [ANSWER_TOKENS, CHAT_ANSWER_TOKENS] = [process.env.ANSWER_TOKENS, process.env.CHAT_ANSWER_TOKENS].map(Number);
const MODEL = "neuron-textgen/demo";
const settings = { baseURL: `${SERVER}/v1`, apiKey: KEY, maxRetries: 0, timeout: 60_000 };
const client = new OpenAI(settings);
const CHAT = { model: MODEL, messages: [{ role: "user", content: QUESTION }], temperature: 0 };
const ENDLESS = { ...CHAT, max_tokens: 1000, ignore_eos: true, stream: true };

async function all(stream) {
    const chunks = [];
    for await (const chunk of stream) chunks.push(chunk);
    return chunks;
}

test("the one model is listed", async () => {
    const models = await client.models.list();
    assert.deepEqual(models.data.map((model) => model.id), [MODEL]);
});

test("a chat is answered with its usage", async () => {
    const completion = await client.chat.completions.create(CHAT);
    const [choice] = completion.choices;
    assert.deepEqual(choice.message, { role: "assistant", content: CHAT_ANSWER });
    assert.equal(choice.finish_reason, "stop");
    assert.equal(completion.usage.completion_tokens, CHAT_ANSWER_TOKENS);
});

test("every delta of a streamed chat has a content to print, and the last chunk its usage", async () => {
    const request = { ...CHAT, stream: true, stream_options: { include_usage: true } };
    const chunks = await all(await client.chat.completions.create(request));
    const last = chunks.pop();
    assert.equal(chunks.map((chunk) => `${chunk.choices[0].delta.content}`).join(""), CHAT_ANSWER);
    assert.equal(chunks.at(-1).choices[0].finish_reason, "stop");
    assert.deepEqual(last.choices, []);
    assert.equal(last.usage.completion_tokens, CHAT_ANSWER_TOKENS);
});

test("the stream helper puts the whole completion together", async () => {
    const runner = client.chat.completions.stream(CHAT);
    const texts = [];
    runner.on("content", (text) => texts.push(text));
    const completion = await runner.finalChatCompletion();
    assert.equal(completion.choices[0].message.content, CHAT_ANSWER);
    assert.equal(texts.join(""), CHAT_ANSWER);
});

test("a completion continues its prompt, whole or streamed", async () => {
    const request = { model: MODEL, prompt: QUESTION, temperature: 0, max_tokens: 100 };
    const completion = await client.completions.create(request);
    assert.equal(completion.choices[0].text, ANSWER);
    assert.equal(completion.usage.completion_tokens, ANSWER_TOKENS);
    const chunks = await all(await client.completions.create({ ...request, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), ANSWER);
});

for (const stream of [false, true]) {
    const how = stream ? "streamed" : "whole";

    test(`an invalid value is a BadRequestError that names the parameter, ${how}`, async () => {
        await assert.rejects(client.chat.completions.create({ ...CHAT, stream, top_p: 7 }), (error) => {
            assert.ok(error instanceof OpenAI.BadRequestError);
            assert.deepEqual([error.status, error.param, error.type], [400, "top_p", "invalid_request_error"]);
            assert.match(error.message, /`top_p` must be/);
            assert.match(error.requestID, /\w/);
            return true;
        });
    });

    test(`context overflow is a BadRequestError with OpenAI's code, ${how}`, async () => {
        await assert.rejects(client.chat.completions.create({ ...CHAT, stream, messages: [{ role: "user", content: "Why? ".repeat(2000) }] }), (error) => {
            assert.ok(error instanceof OpenAI.BadRequestError);
            assert.equal(error.code, "context_length_exceeded");
            return true;
        });
    });

    test(`a wrong key is an AuthenticationError, ${how}`, async () => {
        const stranger = new OpenAI({ ...settings, apiKey: "wrong" });
        await assert.rejects(stranger.chat.completions.create({ ...CHAT, stream }), (error) => {
            assert.ok(error instanceof OpenAI.AuthenticationError);
            assert.equal(error.code, "invalid_api_key");
            return true;
        });
    });
}

test("a stream that is aborted midway gives its place to the next request", { timeout: 60_000 }, async () => {
    const hangUps = async () => {
        const metrics = await (await fetch(`${SERVER}/metrics`)).text();
        return Number(/^tgi_client_disconnects (\S+)$/m.exec(metrics)[1]);
    };
    const before = await hangUps();
    const stream = await client.chat.completions.create(ENDLESS);
    for await (const chunk of stream) {
        assert.ok(chunk.choices[0].delta);
        break; // leaves the loop, and so aborts the request
    }
    assert.ok(stream.controller.signal.aborted);
    while ((await hangUps()) === before);
    const completion = await client.chat.completions.create(CHAT);
    assert.equal(completion.choices[0].message.content, CHAT_ANSWER);
});

test("a busy server is a RateLimitError, and the client's own retries get an answer", async () => {
    const controller = new AbortController();
    const stream = await client.chat.completions.create(ENDLESS, { signal: controller.signal });
    const chunks = stream[Symbol.asyncIterator]();
    await chunks.next();
    await assert.rejects(client.chat.completions.create(CHAT), OpenAI.RateLimitError);
    controller.abort();
    const completion = await client.chat.completions.create(CHAT, { maxRetries: 5 });
    assert.equal(completion.choices[0].message.content, CHAT_ANSWER);
});
