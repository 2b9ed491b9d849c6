// Structured output and tools in JavaScript: openai-node and Vercel's AI SDK by both of its providers. test_javascript.py runs it.
"use strict";

const assert = require("node:assert/strict");
const { describe, test } = require("node:test");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } = require("ai");
const OpenAI = require("openai");
const { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const { CHAT_ANSWER, KEY, QUESTION, SERVER } = process.env;
const MODEL = "neuron-textgen/demo";
const endpoint = { baseURL: `${SERVER}/v1`, apiKey: KEY };
const city = z.enum(["Paris", "Rome", "Oslo"]);
const Forecast = z.object({ city, degrees: z.number().int().min(0).max(40), sunny: z.boolean() });
const GetWeather = z.object({ city, days: z.number().int().min(1).max(9) });

async function all(stream) {
    const events = [];
    for await (const event of stream) events.push(event);
    return events;
}

describe("openai", () => {
    const client = new OpenAI({ ...endpoint, timeout: 60_000 });
    const chat = { model: MODEL, messages: [{ role: "user", content: QUESTION }], temperature: 0, max_tokens: 200 };
    const response = { model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: 200 };
    const forced = { tool_choice: "required", parallel_tool_calls: false };
    const functionTool = { ...chat, ...forced, tools: [zodFunction({ name: "get_weather", parameters: GetWeather })] };
    const responseTool = { ...response, ...forced, tools: [zodResponsesFunction({ name: "get_weather", parameters: GetWeather })] };

    test("parse gives the object of a schema", async () => {
        const request = { ...chat, response_format: zodResponseFormat(Forecast, "forecast") };
        const [choice] = (await client.chat.completions.parse(request)).choices;
        assert.equal(choice.finish_reason, "stop");
        Forecast.parse(choice.message.parsed);
    });

    test("a stream with a schema ends with its object", async () => {
        const request = { ...chat, response_format: zodResponseFormat(Forecast, "forecast") };
        const [choice] = (await client.chat.completions.stream(request).finalChatCompletion()).choices;
        Forecast.parse(choice.message.parsed);
    });

    test("parse gives the arguments of a call", async () => {
        const [choice] = (await client.chat.completions.parse(functionTool)).choices;
        const [call] = choice.message.tool_calls;
        assert.deepEqual([choice.finish_reason, call.type, call.function.name], ["tool_calls", "function", "get_weather"]);
        GetWeather.parse(call.function.parsed_arguments);
    });

    test("a streamed call comes in pieces that the client puts together", async () => {
        const stream = client.chat.completions.stream(functionTool);
        const deltas = [];
        stream.on("tool_calls.function.arguments.delta", (event) => deltas.push(event.arguments_delta));
        const [choice] = (await stream.finalChatCompletion()).choices;
        const [call] = choice.message.tool_calls;
        assert.equal(choice.finish_reason, "tool_calls");
        assert.equal(deltas.join(""), call.function.arguments);
        GetWeather.parse(call.function.parsed_arguments);
    });

    test("a response is created, whole and streamed", async () => {
        assert.equal((await client.responses.create(response)).output_text, CHAT_ANSWER);
        const events = await all(await client.responses.create({ ...response, stream: true }));
        const deltas = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
        assert.equal(deltas.join(""), CHAT_ANSWER);
        assert.equal(events[0].type, "response.created");
        assert.equal(events.at(-1).type, "response.completed");
    });

    test("a parsed response holds the object of a schema, whole and streamed", async () => {
        const request = { ...response, text: { format: zodTextFormat(Forecast, "forecast") } };
        Forecast.parse((await client.responses.parse(request)).output_parsed);
        Forecast.parse((await client.responses.stream(request).finalResponse()).output_parsed);
    });

    test("a response calls a function, whole and streamed, and takes its result", async () => {
        const [call] = (await client.responses.parse(responseTool)).output;
        assert.deepEqual([call.type, call.name], ["function_call", "get_weather"]);
        GetWeather.parse(call.parsed_arguments);
        const [streamed] = (await client.responses.stream(responseTool).finalResponse()).output;
        assert.equal(streamed.arguments, call.arguments);
        const { parsed_arguments, ...item } = call;
        const result = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
        const input = [{ role: "user", content: QUESTION }, item, result];
        assert.ok((await client.responses.create({ ...response, input })).output_text);
    });
});

const compatible = createOpenAICompatible({ name: "neuron-textgen", supportsStructuredOutputs: true, ...endpoint });
const official = createOpenAI(endpoint);
const models = { "openai-compatible": compatible(MODEL), "openai, responses": official(MODEL), "openai, chat": official.chat(MODEL) };

for (const [name, model] of Object.entries(models)) {
    describe(`ai by ${name}`, () => {
        const ask = { model, prompt: QUESTION, temperature: 0, maxOutputTokens: 200 };
        const execute = async ({ city, days }) => `${days} sunny days in ${city}`;
        const tools = { getWeather: tool({ description: "Returns the weather.", inputSchema: GetWeather, execute }) };
        const calling = { ...ask, tools, toolChoice: "required", providerOptions: { openai: { parallelToolCalls: false } } };

        test("generateObject and streamObject give the object of a schema", async () => {
            const { object, finishReason } = await generateObject({ ...ask, schema: Forecast });
            assert.equal(finishReason, "stop");
            Forecast.parse(object);
            const result = streamObject({ ...ask, schema: Forecast });
            assert.deepEqual((await all(result.partialObjectStream)).at(-1), await result.object);
            Forecast.parse(await result.object);
        });

        test("generateText gives the output of a schema", async () => {
            Forecast.parse((await generateText({ ...ask, output: Output.object({ schema: Forecast }) })).output);
        });

        test("a tool is called, whole and streamed", async () => {
            const { toolCalls, toolResults, finishReason } = await generateText(calling);
            assert.equal(finishReason, "tool-calls");
            GetWeather.parse(toolCalls[0].input);
            assert.match(toolResults[0].output, /sunny days in/);
            const streamed = streamText(calling);
            const parts = await all(streamed.fullStream);
            assert.ok(parts.filter((part) => part.type === "tool-input-delta").length > 1);
            assert.deepEqual((await streamed.toolCalls)[0].input, toolCalls[0].input);
        });

        test("the result of a tool is answered in a second step", async () => {
            const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
            const { steps, text } = await generateText({ ...calling, prepareStep, stopWhen: stepCountIs(2) });
            assert.equal(steps.length, 2);
            assert.ok(text);
        });
    });
}

test("a patch is applied where the client is, and its result is answered", async () => {
    const paths = [];
    const execute = async ({ operation }) => {
        paths.push(operation.path);
        return { status: "completed", output: "Changed." };
    };
    const ask = { model: official(MODEL), prompt: QUESTION, temperature: 0, maxOutputTokens: 200, stopWhen: stepCountIs(2) };
    const tools = { apply_patch: official.tools.applyPatch({ execute }) };
    const providerOptions = { openai: { store: false, parallelToolCalls: false } };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
    const whole = await generateText({ ...ask, tools, providerOptions, prepareStep });
    const streamed = streamText({ ...ask, tools, providerOptions, prepareStep });
    await all(streamed.fullStream);
    for (const steps of [whole.steps, await streamed.steps]) {
        assert.equal(steps.length, 2);
        assert.equal(steps[0].toolCalls[0].input.operation.path, paths.shift());
    }
});
