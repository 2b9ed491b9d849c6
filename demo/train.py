"""Train the built-in demonstration model: demo/corpus/*.md in, demo/model/ out.

Owns everything about that model: how the corpus is read, how a question is varied, the tokenizer, the chat
template, the network and its training. The server knows none of this; it loads demo/model/ like any other
checkpoint.

    python demo/train.py                 # retrain, about 18 minutes on two idle cores
    python demo/train.py --start demo/model --steps 700 --rate 1e-3  # after an edit of its texts
    python demo/train.py --steps 20 --out /tmp/model                    # see that it runs
"""

import argparse
import json
import math
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
EOS, SYSTEM, USER, ASSISTANT = "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [EOS, SYSTEM, USER, ASSISTANT]
VOCABULARY = 2048
POSITIONS = 1024
ROPE_THETA = 10000.0
LABELLED = [("Question: ", "\nAnswer:", " "), ("Q: ", "\nA:", " ")]
SYLLABLE_STARTS = [*"bcdfghklmnprstvz", "br", "ch", "dr", "gl", "pl", "st"]
ROW_LENGTHS = [
    256,
    256,
    512,
    1024,
]  # rows of several lengths: short ones start often, long ones reach far positions
STEP_TOKENS = 2048

# A closed answer ends with EOS; an assistant message that comes last stays open, so that it can be continued.
# Tools are described and called as Hermes models do, with the results of calls in a turn of the user.
CHAT_TEMPLATE = (
    "{% if tools %}"
    "<|system|>{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n{% endif %}"
    "You may call these functions:\n<tools>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    'A call looks like this:\n<tool_call>\n{"name": "the name", "arguments": {}}\n</tool_call>'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|>' if loop.first or messages[loop.index0 - 1]['role'] != 'tool' else '\n' }}"
    "<tool_response>\n{{ message['content'] }}\n</tool_response>"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '' if loop.first and not message['content'] else '\n' }}<tool_call>\n"
    '{"name": {{ call["function"]["name"] | tojson }}, '
    '"arguments": {{ (call["function"]["arguments"] or {}) | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}"
    "{% if message['role'] == 'assistant' and not loop.last %}<|endoftext|>{% endif %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Answer:
    """What to reply to any of these questions. Each `{word}`, `{name}` or `{number}` in them is filled in
    anew."""

    questions: list[str]
    text: str


@dataclass(frozen=True)
class Wording:
    """A question that fits the pattern may also be asked in these forms."""

    pattern: re.Pattern
    forms: list[str]


@dataclass(frozen=True)
class Corpus:
    answers: list[Answer]
    passages: list[str]
    systems: list[str]
    names: list[str]
    wordings: list[Wording]

    @property
    def texts(self) -> list[str]:
        return [a.text for a in self.answers] + [q for a in self.answers for q in a.questions] + self.passages


def read_corpus(folder: Path) -> Corpus:
    """Blocks are parted by blank lines: `Q:` lines with their `A:`, `S:` lines (system messages), `N:` (first
    names), `R:` lines with the wordings below them, and `#` lines (headings, skipped). Any other paragraph is
    a passage of prose. Lines of text are joined by a space, or kept apart after a `\\`."""
    corpus = Corpus([], [], [], [], [])
    for path in sorted(folder.glob("*.md")):
        for block in re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip()):
            lines = block.splitlines()
            if block.startswith("Q:"):
                asked, found, text = block.partition("\nA:")
                if not found:
                    raise ValueError(f"{path.name}: no A: below {lines[0]!r}")
                corpus.answers.append(Answer(after("Q:", asked.splitlines()), unwrap(text)))
            elif block.startswith("R:"):
                forms = [line for line in lines if not line.startswith("R:")]
                for line in after("R:", lines):
                    corpus.wordings.append(
                        Wording(re.compile(re.escape(line).replace(r"\{\}", "(.+)")), forms)
                    )
            elif block.startswith("S:"):
                corpus.systems.extend(after("S:", lines))
            elif block.startswith("N:"):
                corpus.names.extend(block.removeprefix("N:").split())
            elif not block.startswith("#"):
                corpus.passages.append(unwrap(block))
    return corpus


def after(mark: str, lines: list[str]) -> list[str]:
    return [line.removeprefix(mark).strip() for line in lines if line.startswith(mark)]


def unwrap(text: str) -> str:
    return re.sub(r"(?<!\\)\n", " ", text.strip()).replace("\\\n", "\n")


def rephrase(question: str, wordings: list[Wording], rng: random.Random) -> str:
    """Another wording of the question at times, then case, punctuation and typing slips as people make
    them."""
    fitting = [(match, w.forms) for w in wordings if (match := w.pattern.fullmatch(question))]
    if fitting and rng.random() < 0.5:
        match, forms = fitting[0] if rng.random() < 0.7 else rng.choice(fitting)
        whole = question.rstrip("?.!")
        question = rng.choice(forms).format(lower_first(match.group(1)), all=lower_first(whole))
        question = question[0].upper() + question[1:]
    if rng.random() < 0.4:
        question = question.rstrip("?.!")
    case = rng.random()
    if case < 0.40:
        question = question.lower()
    elif case < 0.48:
        question = re.sub(r"\b[a-z]{4,}", lambda word: word.group().capitalize(), question)
    elif case < 0.51:
        question = question.upper()
    if rng.random() < 0.1 and len(question) > 6:
        at = rng.randrange(1, len(question) - 2)
        slip = rng.choice(
            [question[at + 1] + question[at], question[at], question[at] * 2 + question[at + 1]]
        )
        question = question[:at] + slip + question[at + 2 :]
    return question


def lower_first(text: str) -> str:
    """Lowers the first letter, but not that of an abbreviation."""
    return text if text[1:2].isupper() else text[0].lower() + text[1:]


def fill(answer: Answer, names: list[str], rng: random.Random) -> tuple[str, str]:
    """One of this answer's questions and the text of the reply, their placeholders filled in alike."""
    question, text = rng.choice(answer.questions), answer.text
    while placeholder := re.search(r"\{(word|name|number)\}", question):
        kind = placeholder.group(1)
        number = str(rng.randrange(10, 10 ** rng.randint(2, 4)))
        value = made_up_word(rng) if kind == "word" else rng.choice(names) if kind == "name" else number
        question, text = (
            question.replace(placeholder.group(), value, 1),
            text.replace(placeholder.group(), value),
        )
    return question, text


def made_up_word(rng: random.Random) -> str:
    """Stands for what the corpus does not cover: the model learns to say that it does not know such words."""
    syllables = [rng.choice(SYLLABLE_STARTS) + rng.choice("aeiou") for _ in range(rng.randint(1, 3))]
    word = "".join(syllables) + rng.choice(["", "n", "r", "s", "t", "x", "l", "nd"])
    kind = rng.choice(["theory", "machine", "festival", "river", "game"])
    return rng.choice([word, word.capitalize(), f"{word} {kind}"])


class Examples:
    """An endless, seeded stream of training examples: (token ids, whether each is to be learnt)."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int):
        self.corpus, self.tokenizer, self.rng = corpus, tokenizer, random.Random(seed)
        # An answer that many questions share is met more often, so that each of them has its turn.
        self.answers = [a for a in corpus.answers for _ in range(1 + len(a.questions) // 5)]
        self.eos = tokenizer.token_to_id(EOS)

    def __iter__(self):
        while True:
            epoch = [self.asked(a) for a in self.answers] + [self.told(p) for p in self.corpus.passages]
            epoch += [
                self.told(a.text)
                for a in self.corpus.answers
                if len(a.text) > 100 and self.rng.random() < 0.1
            ]
            self.rng.shuffle(epoch)
            yield from epoch

    def told(self, text: str) -> tuple[list[int], list[bool]]:
        """A text to be continued, but not from its very first words: "Hello" is to be answered."""
        ids, learnt = self.joined([(text, True), (EOS, True)])
        return ids, [False] * 4 + learnt[4:]

    def question_and_reply(self, answer: Answer) -> tuple[str, str]:
        question, text = fill(answer, self.corpus.names, self.rng)
        return rephrase(question, self.corpus.wordings, self.rng), text

    def asked(self, answer: Answer) -> tuple[list[int], list[bool]]:
        """One answer, asked for in one of the ways the server meets: raw text, a chat, or below a page of
        text."""
        rng = self.rng
        question, text = self.question_and_reply(answer)
        form = rng.random()
        if form < 0.50:
            before, after, space = rng.choice(
                [("", "", " ")] * 12 + [("", " ", ""), ("", "\n", ""), *LABELLED]
            )
            return self.joined([(before + question + after, False), *self.reply(space + text)])
        if form < 0.53:
            page = " ".join(rng.choices(self.corpus.passages, k=rng.randint(1, 3)))
            return self.joined([(f"{page}\n\n{question}", False), *self.reply(" " + text)])
        parts = [(SYSTEM + rng.choice(self.corpus.systems), False)] if rng.random() < 0.4 else []
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
            earlier, earlier_text = self.question_and_reply(rng.choice(self.answers))
            parts += [(USER + earlier + ASSISTANT, False), *self.reply(earlier_text)]
        return self.joined([*parts, (USER + question + ASSISTANT, False), *self.reply(text)])

    def reply(self, text: str) -> list[tuple[str, bool]]:
        """The whole text, or its first words only, so that those are met more often: there the model has to
        find the right answer, which is harder to learn than the words that follow."""
        start = " ".join(text.split(" ")[:8])
        if start == text or self.rng.random() < 0.5:
            return [(text, True), (EOS, True)]
        return [(start, True), (EOS, False)]

    def joined(self, parts: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        ids, learnt = [], []
        for text, learn in parts:
            piece = self.tokenizer.encode(text).ids
            ids += piece
            learnt += [learn] * len(piece)
        return ids, [False, *learnt[1:]]  # the first token follows from nothing


def batches(examples, row_length: int):
    """One step's rows: int64 ids [rows, row_length] and labels, -100 where nothing is to be learnt.

    Each row starts with a fresh example, as every prompt does, and the rest follow it without a mask between
    them: so the model also learns to find the end of a long prompt and to let what came before it be."""
    ids = torch.zeros(STEP_TOKENS // row_length, row_length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row in range(len(ids)):
        at = 0
        while at < row_length:
            tokens, learnt = next(examples)
            end = min(at + len(tokens), row_length)
            ids[row, at:end] = torch.tensor(tokens[: end - at])
            labels[row, at:end] = torch.where(torch.tensor(learnt[: end - at]), ids[row, at:end], -100)
            at = end
    return ids, labels


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    # Every case the questions come in, so that none of them falls apart into letters.
    tokenizer.train_from_iterator([*texts, *texts, *(t.lower() for t in texts)], trainer)
    return tokenizer


def new_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
            attn_implementation="sdpa",
        )
    )


def train(model: LlamaForCausalLM, examples, steps: int, peak_rate: float) -> float:
    """Returns the mean loss of the last 50 steps."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}],
        lr=peak_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    start, recent, warmup = time.monotonic(), [], 100
    for step in range(steps):
        rate = peak_rate * min(
            1, (step + 1) / warmup, 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = batches(examples, ROW_LENGTHS[step % len(ROW_LENGTHS)])
        targets = labels[:, 1:]
        wanted = targets != -100  # logits of these only: the others would cost as much and teach nothing
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[wanted])
        loss = F.cross_entropy(logits.float(), targets[wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = [*recent[-49:], loss.item()]
        if step % 50 == 49 or step == steps - 1:
            minutes = (time.monotonic() - start) / 60
            print(
                f"step {step + 1}/{steps}  loss {sum(recent) / len(recent):.4f}  rate {rate:.1e}  "
                f"{minutes:.1f} min, {minutes / (step + 1) * (steps - step - 1):.1f} to go",
                flush=True,
            )
    return sum(recent) / len(recent)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes what transformers 4.48 and 5 both read: 5 alone would leave out the names that 4 looks for."""
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    config = json.loads((out / "config.json").read_text())
    config |= {"rope_theta": ROPE_THETA, "rope_scaling": None, "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": POSITIONS,
            "bos_token": EOS,
            "eos_token": EOS,
            "pad_token": EOS,
            "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def show_samples(out: Path) -> None:
    """Greedy answers of the checkpoint as it will be served: reloaded from bfloat16, computed in float32."""
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    for prompt in (
        "What is Deep Learning?",
        "what is continuous batching",
        "What is AWS Inferentia?",
        "Hello",
        "Write a haiku about the sea",
        f"{SYSTEM}You are a helpful assistant.{USER}How do I stream tokens?{ASSISTANT}",
        "Who won the chess tournament last week?",
    ):
        ids = tokenizer.encode(prompt).ids
        reply = model.generate(torch.tensor([ids]), max_new_tokens=200, do_sample=False)[
            0, len(ids) :
        ].tolist()
        print(f"\n{prompt}\n -> {tokenizer.decode(reply, skip_special_tokens=False)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in demonstration model.")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, help="go on from this checkpoint and its tokenizer")
    parser.add_argument("--out", type=Path, default=HERE / "model")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    corpus = read_corpus(HERE / "corpus")
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
        model = LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    else:
        tokenizer, model = train_tokenizer(corpus.texts), new_model()
    print(
        f"{len(corpus.answers)} answers, {sum(len(a.questions) for a in corpus.answers)} questions, "
        f"{len(corpus.passages)} passages, {sum(map(len, corpus.texts))} characters; "
        f"{model.num_parameters()} parameters"
    )
    train(model, iter(Examples(corpus, tokenizer, args.seed)), args.steps, args.rate)
    save(model, tokenizer, args.out)
    print(f"saved {sum(f.stat().st_size for f in args.out.iterdir())} bytes in {args.out}")
    show_samples(args.out)


if __name__ == "__main__":
    main()
