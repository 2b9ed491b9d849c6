// Anthropic's client for TypeScript against /v1/messages. test_javascript.py runs it.
"use strict";

const assert = require("node:assert/strict");
const { test } = require("node:test");
const Anthropic = require("@anthropic-ai/sdk").default;

const { CHAT_ANSWER, KEY, QUESTION, SERVER } = process.env;
const [CHAT_ANSWER_TOKENS, CHAT_TOKENS] = [process.env.CHAT_ANSWER_TOKENS, process.env.CHAT_TOKENS].map(Number);
const MODEL = "neuron-textgen/demo";
const settings = { baseURL: SERVER, apiKey: KEY, maxRetries: 0, timeout: 60_000 };
const client = new Anthropic(settings);
const CHAT = [{ role: "user", content: QUESTION }];
const ASKED = { model: MODEL, messages: CHAT, max_tokens: 200, temperature: 0 };
const WEATHER = {
    name: "GetWeather",
    description: "Returns the weather of a city.",
    input_schema: {
        type: "object",
        properties: { city: { enum: ["Paris", "Rome"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
        required: ["city", "days"],
    },
};
const FORCED = { tools: [WEATHER], tool_choice: { type: "tool", name: "GetWeather" } };

test("a message is answered with its usage", async () => {
    const message = await client.messages.create(ASKED);
    assert.deepEqual(message.content, [{ type: "text", text: CHAT_ANSWER }]);
    assert.equal(message.stop_reason, "end_turn");
    const { usage } = message;
    assert.equal(usage.input_tokens + usage.cache_read_input_tokens, CHAT_TOKENS);
    assert.equal(usage.output_tokens, CHAT_ANSWER_TOKENS);
});

test("the stream helper puts the whole message together", async () => {
    const stream = client.messages.stream(ASKED);
    const texts = [];
    stream.on("text", (text) => texts.push(text));
    const message = await stream.finalMessage();
    assert.equal(texts.join(""), CHAT_ANSWER);
    assert.deepEqual(message.content, [{ type: "text", text: CHAT_ANSWER }]);
    assert.ok(texts.length > CHAT_ANSWER_TOKENS / 2);
});

test("a forced call fits its schema, whole or streamed, and its result is answered", async () => {
    const message = await client.messages.create({ ...ASKED, ...FORCED });
    const [call] = message.content;
    assert.deepEqual([message.stop_reason, call.type, call.name], ["tool_use", "tool_use", "GetWeather"]);
    assert.ok(WEATHER.input_schema.properties.city.enum.includes(call.input.city));
    const streamed = await client.messages.stream({ ...ASKED, ...FORCED }).finalMessage();
    assert.deepEqual(streamed.content[0].input, call.input);
    const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "sunny" }] };
    const messages = [...CHAT, { role: "assistant", content: message.content }, result];
    const answer = await client.messages.create({ ...ASKED, messages, tools: [WEATHER] });
    assert.equal(answer.content[0].type, "text");
});

test("earlier thinking, and thinking that is asked for, are taken", async () => {
    const thought = { type: "thinking", thinking: "Hm.", signature: "x" };
    const messages = [...CHAT, { role: "assistant", content: [thought, { type: "text", text: "A method." }] }, CHAT[0]];
    const thinking = { type: "enabled", budget_tokens: 1024 };
    const message = await client.messages.create({ ...ASKED, messages, thinking, max_tokens: 2000 });
    assert.ok(message.content.length > 0);
});

test("tokens are counted as they are used", async () => {
    const counted = await client.messages.countTokens({ model: MODEL, messages: CHAT });
    assert.equal(counted.input_tokens, CHAT_TOKENS);
});

test("the one model is listed", async () => {
    const models = await client.models.list();
    assert.deepEqual(models.data.map((model) => model.id), [MODEL]);
});

test("an invalid value is a BadRequestError that names the parameter", async () => {
    await assert.rejects(client.messages.create({ ...ASKED, top_p: 7 }), (error) => {
        assert.ok(error instanceof Anthropic.BadRequestError);
        assert.equal(error.error.error.type, "invalid_request_error");
        assert.match(error.message, /`top_p` must be/);
        return true;
    });
});

test("another key is an AuthenticationError", async () => {
    const stranger = new Anthropic({ ...settings, apiKey: "wrong" });
    await assert.rejects(stranger.messages.create(ASKED), Anthropic.AuthenticationError);
});

test("a busy server is overloaded", async () => {
    const body = { model: MODEL, prompt: "Hello", temperature: 1, max_tokens: 1000, ignore_eos: true, stream: true };
    const aborter = new AbortController();
    const headers = { "Content-Type": "application/json", Authorization: `Bearer ${KEY}` };
    const endless = await fetch(`${SERVER}/v1/completions`, { method: "POST", headers, body: JSON.stringify(body), signal: aborter.signal });
    await endless.body.getReader().read();
    await assert.rejects(client.messages.create(ASKED), (error) => {
        assert.ok(error instanceof Anthropic.InternalServerError);
        assert.deepEqual([error.status, error.error.error.type], [529, "overloaded_error"]);
        return true;
    });
    aborter.abort();
});

test("an aborted stream frees its place at once", async () => {
    const stream = await client.messages.create({ ...ASKED, stream: true });
    for await (const event of stream) if (event.type === "content_block_delta") break;
    for (let tries = 0; ; tries++) {
        try {
            await client.messages.create({ ...ASKED, max_tokens: 1 });
            return;
        } catch (error) {
            assert.equal(error.status, 529);
            assert.ok(tries < 100);
            await new Promise((resolve) => setTimeout(resolve, 20));
        }
    }
});
