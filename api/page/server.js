// Sends a request to the server and reads the events of its response.

/**
 * Yields {reasoning, content, tokens, finish} for each event, each of them only where the event has it.
 * Throws an Error whose message is for the user, or an AbortError.
 */
export async function* generate(path, body, key, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await fetch(path, options).catch(fail);
  if (!response.ok) throw new Error(`${await problem(response)} (${response.status})`);
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    const delta = choice?.delta ?? { content: choice?.text }; // of a chat or of a completion
    yield {
      reasoning: delta.reasoning ?? delta.reasoning_content,
      content: delta.content ?? delta.tool_calls?.map(written).join(""),
      tokens: event.usage?.completion_tokens,
      finish: choice?.finish_reason,
    };
  }
}

/** A part of a tool call as text: its first one has the function's name. */
const written = ({ function: { name, arguments: given } }) => (name ? `${name} ` : "") + (given ?? "");

function fail(error) {
  throw error.name === "AbortError" ? error : new Error("The connection to the server failed.");
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "The request failed"; // the response is a proxy's own
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(fail);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}
