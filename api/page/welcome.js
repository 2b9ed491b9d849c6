// What the page shows before the first message: the model and things to try, or how far its preparation is.

import { at, element } from "./dom.js";

const { model, preparing, chats, images, tools, sampling, context, precision, device, key } = document.body.dataset;
const isDemo = model === "neuron-textgen/demo";
const callsTools = tools && tools !== "none" && !isDemo; // whose template has tools, which it was never taught
const DEVICES = { cpu: "CPU", cuda: "NVIDIA GPU", neuron: "AWS Neuron" };
const ONCE = ["converting", "compiling"]; // phases
const TEXT = { type: "string" };
const PLACE = { type: "object", properties: { city: TEXT, country: TEXT }, required: ["city", "country"] };
const OF_DEMO = ["What is Deep Learning?", "How do I stream tokens?", "Write a haiku about the sea."];
const TEXTS = ["Once upon a time, a lighthouse keeper found", "The planets are:\n1. Mercury\n2.", "def fibonacci(n):\n"];

/** Messages to which this model can respond: {content, images, extra, kind}, with `extra` for the request's body. */
function examples() {
  if (isDemo) return OF_DEMO.map((content) => ({ content }));
  if (!chats) return TEXTS.map((content) => ({ content }));
  const weather = { name: "get_weather", description: "The weather of a city", parameters: PLACE };
  const withTool = { tools: [{ type: "function", function: weather }] };
  const inJson = { response_format: { type: "json_schema", json_schema: { name: "place", schema: PLACE } } };
  return [
    { content: "Write a short story about a robot who learns to paint." },
    images && { content: "Which shapes and colors do you see?", images: [picture()], kind: "with a picture" },
    callsTools && { content: "What is the weather in Tartu?", extra: withTool, kind: "with a tool" },
    sampling === "host" && { content: "Which city is the capital of Estonia?", extra: inJson, kind: "with a JSON schema" },
    { content: "Why is the sky blue? Explain it in three sentences." },
    { content: "Write a Python function that returns the n-th Fibonacci number." },
  ].filter(Boolean).slice(0, 3);
}

function picture() {
  const pen = element("canvas", { width: 224, height: 224 }).getContext("2d");
  for (const [color, ...place] of [["#fff", 0, 0, 224, 224], ["#d22", 24, 32, 88, 88], ["#15c", 112, 136, 96, 64]]) {
    pen.fillStyle = color;
    pen.fillRect(...place);
  }
  return pen.canvas.toDataURL();
}

/** `onTry` is called with the message that the user chooses. */
export function welcome(onTry) {
  at("welcome-title").textContent = preparing ? `Preparing ${preparing}` : model;
  at("preparing").hidden = !preparing;
  if (preparing) return waitUntilReady();
  const facts = {
    Weights: precision,
    Context: `${Number(context).toLocaleString("en")} tokens`,
    "Runs on": DEVICES[device],
    "Reads images": images ? "yes" : "no",
    "Calls tools": callsTools ? "yes" : "not by itself",
    ...(key && { "API key": "in Settings" }),
  };
  const terms = Object.entries(facts).map(([name, fact]) => [element("dt", {}, name), element("dd", {}, fact)]);
  at("facts").append(...terms.map((term) => element("div", {}, ...term)));
  for (const example of examples()) {
    const card = element("button", { type: "button" }, example.content, element("small", {}, example.kind ?? ""));
    card.addEventListener("click", () => onTry(example));
    at("examples").append(element("li", {}, card));
  }
}

/** Shows how far the model is. Loads the page again when it is ready. */
async function waitUntilReady() {
  const response = await fetch("health").catch(() => null);
  if (response?.ok) return location.reload();
  const { phase = "no response", progress = "" } = (await response?.json().catch(() => null)) ?? {};
  const text = (progress || phase) + (ONCE.includes(phase) ? ". Later starts skip this." : "");
  if (at("phase").textContent !== text) at("phase").textContent = text; // a screen reader reads it once
  const percent = /(\d+) %/.exec(progress)?.[1];
  if (percent) at("bar").value = percent;
  else at("bar").removeAttribute("value");
  setTimeout(waitUntilReady, 1000);
}
