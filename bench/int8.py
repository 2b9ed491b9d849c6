"""What --quantize int8 costs on this CPU in exactness, and what it brings in time.

    .venv/bin/python bench/int8.py [--model-id FOLDER --text FILE] [--dtype bfloat16,float32] [--batch 1,4,16]

The demonstration model reads prose that it was trained on, and a model of SmolLM2-135M's shape with random weights 512 random
tokens; with --model-id that model reads 2,048 tokens of the file in windows of 512. Of each form: perplexity, the logits' root
mean square error in the unit of their own spread (standard deviation), the share of places where the likeliest token is that
of float32, and the median time of a decode step at contexts of 160 to 191 tokens, the forms taking turns.
"""

import argparse
import functools
import math
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from decode_step import decode, one_round, save_random_model  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from config import Config, Manifest  # noqa: E402
from torch_model import TorchModel  # noqa: E402

TOKENS, WINDOW = 2048, 512


def forms(dtypes: list[str]) -> list[tuple[str, str | None]]:
    return list(dict.fromkeys([("float32", None), *((dtype, how) for dtype in dtypes for how in (None, "int8"))]))


def load(folder: Path, dtype: str, quantize: str | None, slots: int) -> TorchModel:
    threads, manifest = torch.get_num_threads(), Manifest.read(folder)
    config = Config(
        model_id=str(folder), device="cpu", dtype=dtype, quantize=quantize, max_batch_size=slots, max_total_tokens=WINDOW + 1
    )
    model = TorchModel(config.with_manifest(manifest), folder, manifest, "cpu")
    torch.set_num_threads(threads)  # the same for all, whatever it chose
    return model


def logits_of(model: TorchModel, texts: list[list[int]]) -> torch.Tensor:
    """float32 [tokens, vocab], each text from its own beginning."""
    return torch.cat([part for ids in texts for part in model.score(0, ids)])


def perplexity(logits: torch.Tensor, texts: list[list[int]]) -> float:
    """Of every token that has one before it."""
    logprobs = torch.log_softmax(logits, -1).split([len(ids) for ids in texts])
    of_next = [of[:-1].gather(1, torch.tensor(ids[1:])[:, None]) for of, ids in zip(logprobs, texts)]
    return math.exp(-torch.cat(of_next).mean().item())


def tell(name: str, folder: Path, texts: list[list[int]], dtypes: list[str], batches: list[int]) -> None:
    print(f"{name}: {sum(map(len, texts))} tokens\n{'form':16} {'perplexity':>10} {'rms error':>10} {'likeliest':>10}")
    exact = None
    for dtype, quantize in forms(dtypes):
        logits = logits_of(load(folder, dtype, quantize, 2), texts)
        exact = logits if exact is None else exact
        error = ((logits - exact).square().mean().sqrt() / exact.std()).item()
        same = (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()
        print(f"{' '.join(filter(None, (dtype, quantize))):16} {perplexity(logits, texts):10.4g} {error:10.2%} {same:10.1%}")
    for batch in batches:
        steps = {" ".join(filter(None, form)): functools.partial(decode, load(folder, *form, batch)) for form in forms(dtypes)}
        rounds = [one_round(steps, torch.arange(batch)) for _ in range(4)][1:]
        told = (f"{of} {statistics.median(took[of] for took in rounds):.2f}" for of in steps)
        print(f"step of {batch} slots, ms: {', '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-id", type=Path)
    parser.add_argument("--text", type=Path, help="what the model of --model-id reads")
    parser.add_argument("--dtype", type=lambda value: value.split(","), default=["bfloat16", "float32"])
    parser.add_argument("--batch", type=lambda value: [int(n) for n in value.split(",")], default=[1, 4, 16])
    arguments = parser.parse_args()
    if (arguments.model_id is None) != (arguments.text is None):
        parser.error("--model-id and --text go together")
    folder = arguments.model_id or HERE / "demo" / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if arguments.text:
        ids = tokenizer.encode(arguments.text.read_text()).ids[:TOKENS]
        texts = [ids[begin : begin + WINDOW] for begin in range(0, len(ids), WINDOW)]
    else:
        _heading, *paragraphs = (HERE / "demo" / "corpus" / "prose.md").read_text().split("\n\n")
        texts = [tokenizer.encode(" ".join(paragraph.split())).ids for paragraph in paragraphs]
    tell(str(arguments.model_id or "the demonstration model"), folder, texts, arguments.dtype, arguments.batch)
    if arguments.model_id is None:
        with tempfile.TemporaryDirectory() as scratch:
            random = save_random_model(Path(scratch))
            ids = torch.randint(49152, (WINDOW,), generator=torch.Generator().manual_seed(1)).tolist()
            tell("random weights", random, [ids], arguments.dtype, arguments.batch)


if __name__ == "__main__":
    main()
