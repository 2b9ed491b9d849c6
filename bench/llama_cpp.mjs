// Tokens/s of llama.cpp on a GGUF file, by node-llama-cpp's prebuilt program, to compare with this server.
//
//     npm install node-llama-cpp@3.14.2 && node bench/llama_cpp.mjs FILE.gguf STREAMS [TOKENS]
//
// As `make bench URL=...` asks a server: greedy, 64 tokens for a prompt of some 130, each prompt another text. The first of
// four rounds does not count.
import { availableParallelism } from "node:os";
import { getLlama, LlamaCompletion } from "node-llama-cpp";

const [file, streams, tokens] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4] ?? 64)];
const threads = availableParallelism();
const llama = await getLlama({ gpu: false, build: "never", maxThreads: threads });
const model = await llama.loadModel({ modelPath: file });
const context = await model.createContext({ contextSize: 1024, sequences: streams, threads });
const completions = Array.from({ length: streams }, () => new LlamaCompletion({ contextSequence: context.getSequence() }));

let asked = 0;

function prompt() {
    asked += 1;
    return `Text number ${asked}: ` + "What is deep learning, and what is it not? ".repeat(11);
}

async function round() {
    const startedAt = performance.now();
    const options = { maxTokens: tokens, temperature: 0 };
    await Promise.all(completions.map((completion) => completion.generateCompletion(prompt(), options)));
    return (streams * tokens * 1000) / (performance.now() - startedAt);
}

await round();
const found = [await round(), await round(), await round()].map((speed) => speed.toFixed(1));
console.log(`${streams} streams: ${found.join(", ")} tokens/s`);
process.exit(0);
