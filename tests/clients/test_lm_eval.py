"""lm-eval by its `local-completions`: what the server gives is what its `--model hf` computes from the same model.

This environment sees the server's own packages too, for torch and transformers (Makefile).
"""

import os

import pytest
from demo_server import QUESTION, ROOT, serving

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # before lm_eval is imported

import datasets
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

MODEL = str(ROOT / "demo/model")
LONG_TEXT = (ROOT / "demo/corpus/prose.md").read_text()[:8000]  # about twice the model's window
ITEMS = [
    {"question": "Deep learning is a branch of", "choices": ["machine learning", "cooking", "law"], "answer": 0},
    {"question": f"{QUESTION} Deep learning is a", "choices": ["fish", "song", "branch of machine learning"], "answer": 2},
    {"question": LONG_TEXT, "choices": ["the", "The end.", "of it"], "answer": 1},
]
TEXTS = [{"text": "The sun rose over the hills."}, {"text": LONG_TEXT}]
PROMPTS = [{"prompt": QUESTION}, {"prompt": "What is AWS Inferentia?"}, {"prompt": "Hello"}]


def task(name, items, **config):
    """An evaluation of `items`, one by one, without examples in front."""
    dataset = {"test": datasets.Dataset.from_list(items)}
    fixed = {"custom_dataset": lambda **_: dataset, "test_split": "test", "num_fewshot": 0}
    return {"task": name} | fixed | config


TASKS = [
    task(
        "choices",
        ITEMS,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="choices",
        doc_to_target="answer",
    ),
    task("perplexity", TEXTS, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}"),
    task(
        "texts",
        PROMPTS,
        output_type="generate_until",
        doc_to_text="{{prompt}}",
        doc_to_target="",
        generation_kwargs={"until": [" layers"], "max_gen_toks": 40},
    ),
]


def evaluate(client, **model_args):
    """By task, in the items' order: (log-likelihood, whether a greedy text would be the same), log-likelihoods, texts."""
    manager = TaskManager(include_defaults=False)
    done = simple_evaluate(
        client, model_args, [dict(task) for task in TASKS], batch_size=4, bootstrap_iters=0, task_manager=manager, device="cpu"
    )
    samples = {name: sorted(done["samples"][name], key=lambda sample: sample["doc_id"]) for name in done["samples"]}
    return {name: [answer for sample in samples[name] for answer in sample["filtered_resps"]] for name in samples}


@pytest.fixture(scope="module")
def expected():
    # local-completions asks for one token more than it scores, and its windows are one token shorter than they could be
    return evaluate("hf", pretrained=MODEL, dtype="float32", max_length=1022)


@pytest.fixture(scope="module")
def url():
    with serving() as url:
        yield url


@pytest.mark.parametrize("settings", [{}, {"num_concurrent": 4}, {"tokenized_requests": False}], ids=str)
def test_scores_and_texts_are_those_of_the_model_itself(url, expected, settings):
    endpoint = {"base_url": f"{url}/v1/completions", "model": "demo", "tokenizer": MODEL, "max_length": 1024}
    got = evaluate("local-completions", tokenizer_backend="huggingface", **endpoint, **settings)
    scores, greedy = zip(*got["choices"])
    expected_scores, expected_greedy = zip(*expected["choices"])
    assert len(scores) == 9
    assert scores == pytest.approx(expected_scores, rel=1e-5, abs=1e-4)
    assert greedy == expected_greedy
    assert got["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-5)
    assert got["texts"] == expected["texts"]
