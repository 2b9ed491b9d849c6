// The form: sends messages, receives responses, and restores the text when there is none.

import { add, addProblem, chats, cut, messages, paint, scrollToEnd } from "./conversation.js";
import { at } from "./dom.js";
import { getImages, imagesAreRead, setImages } from "./images.js";
import { generate } from "./server.js";
import { load, save } from "./storage.js";
import { welcome } from "./welcome.js";

const LABEL = chats ? "Message" : "Text to continue";
const NOTHING = { content: "", images: [] };
const prompt = at("prompt");
let running = null; // the AbortController of the request in flight
let ended = Promise.resolve(); // once the last request is over
let edited = null; // the index of the message that the text in the field replaces
let draft = NOTHING; // what was in the field before it
let isLeaving = false; // for another page, or to load this one again

/** Requests a response to {content, images, extra} as the message at `index`. Without one, restores what was there. */
async function ask({ content, images, extra }, index) {
  const before = messages.slice(index);
  cut(index);
  add({ role: "user", content, images, extra });
  scrollToEnd();
  keep();
  const plain = !chats || Boolean(extra) || at("schema").value.trim() !== "";
  const answer = { role: "assistant", content: "", reasoning: "", thought: "", plain, figures: "" };
  running = new AbortController();
  showRunning(true);
  const problem = await receive(answer, request(content, extra), running.signal);
  running = null;
  showRunning(false);
  const isAnswered = messages.includes(answer);
  if (!isAnswered) {
    cut(index);
    before.forEach(add);
  }
  if (problem || !isAnswered) hold({ content, images }, index);
  if (problem) addProblem(problem, () => at("form").requestSubmit());
  keep();
}

/** Fills the answer in; adds it with its first text. Returns the error message for the user. */
async function receive(answer, [path, body], signal) {
  const startedAt = performance.now();
  let firstAt = 0;
  let tokens = 0;
  let finish = "stopped";
  let problem = "";
  let article = null;
  let frame = 0;
  try {
    for await (const part of generate(path, body, at("key").value, signal)) {
      tokens = part.tokens ?? tokens;
      finish = part.finish ?? finish;
      firstAt ||= performance.now(); // also of a token that is not shown, such as the marker of a tool call
      if (!part.reasoning && !part.content) continue;
      article ??= add(answer);
      if (answer.reasoning && part.content) answer.thought ||= secondsSince(firstAt).toFixed(1);
      answer.reasoning += part.reasoning ?? "";
      answer.content += part.content ?? "";
      showStatus(answer.content ? "Generating" : "Thinking");
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(() => paint(answer, article));
    }
  } catch (error) {
    if (error.name !== "AbortError") problem = error.message;
  }
  if (article) {
    answer.figures = figures({ startedAt, firstAt, tokens, finish });
    paint(answer, article);
  }
  return problem;
}

function figures({ startedAt, firstAt, tokens, finish }) {
  const parts = [`first token after ${((firstAt - startedAt) / 1000).toFixed(2)} s`];
  if (tokens > 1) parts.unshift(`${((tokens - 1) / secondsSince(firstAt)).toFixed(1)} tokens/s`);
  if (tokens) parts.push(`${tokens} tokens`);
  if (finish === "stopped") parts.push("stopped");
  if (finish === "length") parts.push("stopped: max tokens");
  return parts.join(", ");
}

const secondsSince = (then) => (performance.now() - then) / 1000;

function showRunning(isRunning) {
  const hadFocus = [document.body, at("send"), at("stop")].includes(document.activeElement);
  at("send").hidden = isRunning;
  at("stop").hidden = !isRunning;
  at("chat").setAttribute("aria-busy", isRunning); // a screen reader reads the complete response
  showStatus(isRunning ? "Waiting" : "");
  if (hadFocus) at(isRunning ? "stop" : "send").focus();
}

function showStatus(text) {
  if (at("status").textContent !== text) at("status").textContent = text;
}

// The request: its path and body.

function request(text, extra) {
  if (!chats) return ["v1/completions", { ...parameters(), prompt: text }];
  const asked = messages.map(({ role, content, images }) => ({ role, content: parts(content, images) }));
  const system = at("system").value.trim();
  if (system) asked.unshift({ role: "system", content: system });
  return ["v1/chat/completions", { ...parameters(), ...extra, messages: asked }];
}

/** The content of a message: a text, or images and the text. */
function parts(text, images) {
  if (!images?.length) return text;
  const content = images.map((url) => ({ type: "image_url", image_url: { url } }));
  if (text) content.push({ type: "text", text });
  return content;
}

function parameters() {
  const body = { stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (at(name).value !== "") body[name] = Number(at(name).value);
  }
  const schema = at("schema").value.trim();
  if (schema) {
    const format = { name: "answer", schema: JSON.parse(schema) };
    body.response_format = { type: "json_schema", json_schema: format };
  }
  return body;
}

function schemaIsValid() {
  let problem = "";
  try {
    const schema = JSON.parse(at("schema").value.trim() || "{}");
    const isObject = schema !== null && typeof schema === "object" && !Array.isArray(schema);
    if (!isObject) problem = "A JSON schema is an object: {…}";
  } catch (error) {
    problem = `The schema is not valid JSON: ${error.message}`;
  }
  at("schema-error").textContent = problem;
  at("schema").setAttribute("aria-invalid", problem !== "");
  return !problem;
}

// The field: a new message, or an earlier one that is sent again in place of what follows it.

async function submit() {
  await imagesAreRead();
  const message = written();
  if (!(message.content.trim() || message.images.length) || !isReady()) return;
  const index = edited ?? messages.length;
  release();
  ended = ask(message, index);
}

const written = () => ({ content: prompt.value, images: getImages() });

function isReady() {
  if (running) return false;
  if (schemaIsValid()) return true;
  at("settings").open = true;
  at("schema").focus();
  return false;
}

/** Puts a message into the field, to be sent as the one at `index`. */
function hold(message, index) {
  if (edited === null) draft = written();
  show(message);
  setEdited(index < messages.length ? index : null);
}

function release() {
  show(draft);
  draft = NOTHING;
  setEdited(null);
}

function show({ content, images }) {
  prompt.value = content;
  setImages(images ?? []);
}

function setEdited(index) {
  edited = index;
  at("cancel").hidden = index === null;
  at("prompt-label").textContent = index === null ? LABEL : "Edit the message (removes what follows)";
  [...at("chat").children].forEach((article, place) => article.classList.toggle("edited", place === index));
}

async function startAnew() {
  running?.abort();
  await ended;
  cut(0);
  release();
  keep();
  prompt.focus();
}

function keep() {
  if (isLeaving) return; // the browser ends the request, and its partial response is kept already
  if (!at("keep").checked) return save({ keep: false });
  const system = at("system").value;
  if (save({ system, messages })) return;
  save({ system, messages: messages.map((message) => ({ ...message, images: [] })) }); // a browser keeps 5 MB
}

function restore() {
  const kept = load();
  at("keep").checked = kept.keep ?? true;
  at("system").value = kept.system ?? "";
  kept.messages?.forEach(add);
  const last = messages.at(-1);
  if (last?.role === "user") { // the page was left before its response began
    cut(messages.length - 1);
    hold(last, messages.length);
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && edited !== null) release();
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
at("schema").addEventListener("change", schemaIsValid);
at("stop").addEventListener("click", () => running?.abort());
at("cancel").addEventListener("click", () => {
  release();
  prompt.focus();
});
at("clear").addEventListener("click", startAnew);
at("chat").addEventListener("edit", ({ detail: index }) => {
  hold(messages[index], index);
  prompt.focus();
});
at("chat").addEventListener("regenerate", ({ detail: index }) => {
  if (isReady()) ended = ask(messages[index - 1], index - 1);
});
at("keep").addEventListener("change", keep);
at("system").addEventListener("change", keep);
addEventListener("pagehide", () => {
  if (running) keep();
  isLeaving = true;
});
addEventListener("pageshow", () => {
  isLeaving = false;
});

at("prompt-label").textContent = LABEL;
at("system-label").hidden = !chats;
at("model").textContent = document.body.dataset.model ?? at("model").textContent;
at("toy").hidden = document.body.dataset.model !== "neuron-textgen/demo";
at("form").parentElement.hidden = !document.body.dataset.model;
welcome((example) => {
  if (!isReady()) return;
  at("send").focus(); // which becomes Stop
  ended = ask(example, 0);
});
if (document.body.dataset.model) restore();
