// @huggingface/inference against an endpoint's URL. test_javascript.py runs it.
// Version 3 generates text by TGI's own routes, version 4 by /v1/completions.
"use strict";

const assert = require("node:assert/strict");
const { test } = require("node:test");
const four = require("@huggingface/inference");
const three = require("huggingface-inference-3");

const { ANSWER, CHAT_ANSWER, KEY, QUESTION, SERVER } = process.env;
const [ANSWER_TOKENS, CHAT_ANSWER_TOKENS] = [process.env.ANSWER_TOKENS, process.env.CHAT_ANSWER_TOKENS].map(Number);
const chat = { messages: [{ role: "user", content: QUESTION }], temperature: 0 };

async function all(stream) {
    const parts = [];
    for await (const part of stream) parts.push(part);
    return parts;
}

function connect({ InferenceClient }, key = KEY) {
    return new InferenceClient(key, { endpointUrl: SERVER, retry_on_error: false });
}

test("3: a text is generated, with its prompt unless the client declines it", async () => {
    const client = connect(three);
    assert.equal((await client.textGeneration({ inputs: QUESTION })).generated_text, QUESTION + ANSWER);
    const parameters = { return_full_text: false };
    assert.equal((await client.textGeneration({ inputs: QUESTION, parameters })).generated_text, ANSWER);
});

test("3: a streamed text comes token by token and ends with the whole text", async () => {
    const parameters = { return_full_text: false, details: true };
    const parts = await all(connect(three).textGenerationStream({ inputs: QUESTION, parameters }));
    assert.equal(parts.length, ANSWER_TOKENS);
    assert.equal(parts.map(({ token }) => (token.special ? "" : token.text)).join(""), ANSWER);
    const last = parts.at(-1);
    assert.equal(last.generated_text, ANSWER);
    assert.deepEqual([last.details.finish_reason, last.details.generated_tokens], ["eos_token", ANSWER_TOKENS]);
});

test("3: an invalid value is an error with the server's words, whole or streamed", async () => {
    const request = { inputs: QUESTION, parameters: { top_p: 7 } };
    await assert.rejects(connect(three).textGeneration(request), /Input validation error: `top_p` must be/);
    await assert.rejects(all(connect(three).textGenerationStream(request)), /Input validation error: `top_p` must be/);
});

test("4: a text is generated, whole or streamed", async () => {
    const request = { inputs: QUESTION, parameters: { temperature: 0, max_new_tokens: 100 } };
    assert.equal((await connect(four).textGeneration(request)).generated_text, ANSWER);
    const parts = await all(connect(four).textGenerationStream(request));
    assert.equal(parts.map((part) => part.choices[0].text).join(""), ANSWER);
});

for (const [version, client] of [
    ["3", connect(three)],
    ["4", connect(four)],
    ["4 with a URL that ends in /v1", connect(four).endpoint(`${SERVER}/v1`)],
]) {
    test(`${version}: a chat is answered with its usage`, async () => {
        const { choices, usage } = await client.chatCompletion(chat);
        assert.equal(choices[0].message.content, CHAT_ANSWER);
        assert.equal(choices[0].finish_reason, "stop");
        assert.equal(usage.completion_tokens, CHAT_ANSWER_TOKENS);
    });

    test(`${version}: every delta of a streamed chat has a content to print`, async () => {
        const chunks = await all(client.chatCompletionStream(chat));
        assert.equal(chunks.map((chunk) => `${chunk.choices[0].delta.content}`).join(""), CHAT_ANSWER);
        assert.equal(chunks.at(-1).choices[0].finish_reason, "stop");
    });
}

test("4: errors are InferenceClientProviderApiErrors with the server's status and body, whole or streamed", async () => {
    const invalid = { ...chat, temperature: -1 };
    for (const [asked, status, param] of [
        [() => connect(four).chatCompletion(invalid), 400, "temperature"],
        [() => all(connect(four).chatCompletionStream(invalid)), 400, "temperature"],
        [() => connect(four, "wrong").chatCompletion(chat), 401, null],
    ]) {
        await assert.rejects(asked, (error) => {
            assert.ok(error instanceof four.InferenceClientProviderApiError);
            assert.equal(error.httpResponse.status, status);
            assert.equal(error.httpResponse.body.error.param, param);
            return true;
        });
    }
});
