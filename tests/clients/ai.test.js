// Vercel's AI SDK by its provider for servers that speak OpenAI's API, and by that of OpenAI. test_javascript.py runs it.
"use strict";

const assert = require("node:assert/strict");
const { test } = require("node:test");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { APICallError, generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");

const { CHAT_ANSWER, KEY, QUESTION, SERVER } = process.env;
const CHAT_ANSWER_TOKENS = Number(process.env.CHAT_ANSWER_TOKENS);

function provider(apiKey) {
    return createOpenAICompatible({ name: "neuron-textgen", baseURL: `${SERVER}/v1`, apiKey, includeUsage: true });
}
const demo = provider(KEY);
const chat = { model: demo("demo"), prompt: QUESTION, temperature: 0, maxRetries: 0 };

async function stream(request) {
    const result = streamText(request);
    const pieces = [];
    for await (const piece of result.textStream) pieces.push(piece);
    assert.ok(pieces.length > 10);
    return { text: pieces.join(""), finishReason: await result.finishReason, usage: await result.usage };
}

for (const generate of [generateText, stream]) {
    test(`a chat is answered with its usage, ${generate.name}`, async () => {
        const { text, finishReason, usage } = await generate(chat);
        assert.deepEqual([text, finishReason, usage.outputTokens], [CHAT_ANSWER, "stop", CHAT_ANSWER_TOKENS]);
    });
}

test("a completion model gives the same text whole and streamed", async () => {
    const request = { ...chat, model: demo.completionModel("demo") }; // makes a dialogue of the prompt, with stop strings
    const [whole, streamed] = [await generateText(request), await stream(request)];
    assert.match(whole.text, /^Deep learning/);
    assert.equal(streamed.text, whole.text);
    for (const count of ["inputTokens", "outputTokens", "totalTokens"]) assert.equal(streamed.usage[count], whole.usage[count]);
    assert.ok(whole.usage.outputTokens > 10);
});

test("a conversation with a system prompt and a limit is answered", async () => {
    const messages = [
        { role: "user", content: "Hello" },
        { role: "assistant", content: "Hello!" },
        { role: "user", content: QUESTION },
    ];
    const result = await generateText({ ...chat, prompt: undefined, system: "Be brief.", messages, maxOutputTokens: 3 });
    assert.deepEqual([result.finishReason, result.usage.outputTokens], ["length", 3]);
});

test("OpenAI's provider refers to the items of earlier turns, also of those with a tool", async () => {
    const model = createOpenAI({ baseURL: `${SERVER}/v1`, apiKey: KEY })("demo");
    const inputSchema = z.object({ city: z.enum(["Paris", "Rome"]) });
    const tools = { getWeather: tool({ description: "Returns the weather.", inputSchema, execute: async () => "sunny" }) };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
    const messages = [];
    for (const turn of [1, 2, 3, 4, 5]) {
        messages.push({ role: "user", content: QUESTION });
        const request = { model, messages, tools, prepareStep, stopWhen: stepCountIs(2), maxOutputTokens: 60, maxRetries: 0 };
        const result = await generateText({ ...request, providerOptions: { openai: { parallelToolCalls: false } } });
        assert.equal(result.steps.length, 2);
        assert.ok(result.text);
        const { input } = result.request.body;
        assert.equal(input.filter((item) => item.type === "item_reference").length, turn - 1);
        messages.push(...result.response.messages);
    }
});

test("an invalid value is an APICallError with the server's status and words", async () => {
    await assert.rejects(generateText({ ...chat, topP: 7 }), (error) => {
        assert.ok(APICallError.isInstance(error));
        assert.deepEqual([error.statusCode, error.isRetryable], [400, false]);
        assert.match(error.message, /`top_p` must be/);
        return true;
    });
});

test("an error of a stream reaches onError before any text", async () => {
    const errors = [];
    const result = streamText({ ...chat, topP: 7, onError: ({ error }) => errors.push(error) });
    for await (const piece of result.textStream) assert.fail(piece);
    assert.equal(errors.length, 1);
    assert.ok(APICallError.isInstance(errors[0]));
    assert.equal(errors[0].statusCode, 400);
});

test("a wrong key is an APICallError with 401", async () => {
    await assert.rejects(generateText({ ...chat, model: provider("wrong")("demo") }), (error) => {
        assert.equal(error.statusCode, 401);
        return true;
    });
});
