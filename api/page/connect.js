// The dialog "Connect": lines that point a client at this server, to be pasted as they are. docs/agents.md and
// docs/clients.md have the same ones, and tests run them there.

import { at, codeBlock, element } from "./dom.js";

const AGENTS_NEED = 32768; // tokens of context, for their instructions and tools
const { model, chats, context, key: needsKey } = document.body.dataset;
const url = new URL(".", location).href.slice(0, -1);
const key = needsKey ? "YOUR_KEY" : "none";
const maxTokens = Math.min(8192, Math.floor(context / 2));

const quoted = (text) => (/^[\w.:/@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const json = JSON.stringify; // of a string it is one in TOML and Python, too

const claudeCode = () => `export ANTHROPIC_BASE_URL=${url}
export ANTHROPIC_AUTH_TOKEN=${key}
export ANTHROPIC_MODEL=${quoted(model)}
export ANTHROPIC_SMALL_FAST_MODEL=${quoted(model)}
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude`;

const codex = () => `model = ${json(model)}
model_provider = "textgen"
model_context_window = ${context}

[model_providers.textgen]
name = "textgen"
base_url = "${url}/v1"
wire_api = "responses"${needsKey ? '\nenv_key = "TEXTGEN_KEY"' : ""}`;

const opencode = () => `{
  "$schema": "https://opencode.ai/config.json",
  "model": ${json(`textgen/${model}`)},
  "provider": {
    "textgen": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "textgen",
      "options": {"baseURL": "${url}/v1", "apiKey": "${key}"},
      "models": {${json(model)}: {"name": ${json(model)}, "limit": {"context": ${context}, "output": ${maxTokens}}}}
    }
  }
}`;

const openai = () => `from openai import OpenAI

client = OpenAI(base_url="${url}/v1", api_key="${key}")
chat = client.chat.completions.create(
    model=${json(model)},
    messages=[{"role": "user", "content": "What is deep learning?"}],
)
print(chat.choices[0].message.content)`;

const anthropic = () => `from anthropic import Anthropic

client = Anthropic(base_url="${url}", api_key="${key}")
message = client.messages.create(
    model=${json(model)},
    max_tokens=200,
    messages=[{"role": "user", "content": "What is deep learning?"}],
)
print(message.content[0].text)`;

const curl = () => {
  const messages = [{ role: "user", content: "What is deep learning?" }];
  return post("/v1/chat/completions", { model, messages });
};

const curlCompletion = () => post("/v1/completions", { model, prompt: "Deep learning is", max_tokens: 50 });

function post(path, body) {
  const header = needsKey ? ` -H 'Authorization: Bearer ${key}'` : "";
  const text = json(body).replaceAll("'", "'\\''");
  return `curl ${url}${path} -H 'Content-Type: application/json'${header} \\\n    -d '${text}'`;
}

const CLIENTS = [
  ["Claude Code", claudeCode],
  ["Codex: ~/.codex/config.toml", codex],
  ["opencode: opencode.json", opencode],
  ["Python, openai", openai],
  ["Python, anthropic", anthropic],
  ["curl", curl],
];
const COMPLETIONS_ONLY = [["curl", curlCompletion]];

function notes() {
  const lines = [];
  if (needsKey) lines.push("This server requires an API key: replace YOUR_KEY. Codex reads it from TEXTGEN_KEY.");
  if (!chats) lines.push("This model has no chat template: it completes texts.");
  else if (context < AGENTS_NEED) {
    lines.push(`Coding agents need a context length of ${AGENTS_NEED} tokens or more; this server has ${context}.`);
  }
  return lines.map((line) => element("p", {}, line));
}

function show() {
  const clients = chats ? CLIENTS : COMPLETIONS_ONLY;
  at("clients").replaceChildren(...notes(), ...clients.map(([name, text]) => codeBlock(name, text())));
  at("connect").showModal();
}

at("open-connect").hidden = !model; // it is loading
at("open-connect").addEventListener("click", show);
at("close-connect").addEventListener("click", () => at("connect").close());
