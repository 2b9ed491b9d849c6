"""How near the logits of an engine have to be to those of transformers: one rule for conversions, for every
startup, and for plain PyTorch.

A dense model is judged by its worst token. In a mixture of experts any rounding swaps experts whose scores
nearly tie, and changes a few tokens as much as a fault would: it is judged by the median token, and by the
mean, which is large where more than a few are wrong.
"""

from __future__ import annotations

import numpy as np

# Largest difference of a token's logit in float32, as a share of the largest logit (at least 1).
TOLERANCE = 1e-3
# Largest Kullback-Leibler divergence of the tokens of a text, in nats: their mean, and the worst of a dense
# model. SmolLM2-135M, a small model that knows openvino/check_text.txt, has 0.004 and 0.04 in bfloat16,
# 0.04 and 0.3 in int8, 1.6 and 8 where all layers have int4. A broken model has several nats.
MAX_KL_DIVERGENCE = {
    "float32": (0.02, 0.02),
    "bfloat16": (0.1, 0.3),
    "float16": (0.1, 0.3),
    "u8": (0.1, 0.3),  # a KV cache of eight bits under float32 or bfloat16
    "int8": (0.1, 1.0),  # weights or activations
    "int4": (1.0, 10.0),
}
# A mixture of experts has the limit of the mean for its median token, and this many times that for its mean.
SWAPPED_EXPERTS = 2


def find_fault(found: np.ndarray, expected: np.ndarray, precision: str, has_experts: bool) -> str | None:
    """Returns how `found` exceeds the allowed difference from `expected`, as a part of a log line; None: it
    does not. Raises nothing for NaN or infinite logits: they are a fault.

    found, expected: logits, float32 [tokens, columns]; the columns are the vocabulary, or a few tokens of it.
    precision: a key of MAX_KL_DIVERGENCE, of what rounds most: the arithmetic, the KV cache or compressed
    weights; with "float32" the logits themselves are compared, too (TOLERANCE). Callers judge each way to run
    a model (in chunks, step by step) by a call of its own: in a mixture of experts a fault of one of several
    ways may not reach the median.
    """
    if not np.isfinite(found).all():
        return "the model produced NaN or infinite logits"
    judge = np.median if has_experts else np.max
    if precision == "float32":
        error = judge(np.abs(found - expected).max(-1)) / max(1.0, np.abs(expected).max())
        if error > TOLERANCE:
            return f"its logits differ from those of transformers by {error:.2g} times the largest"
    divergence = kl_divergence(found, expected)
    token = judge(divergence)
    mean = divergence.mean()
    mean_limit, token_limit = MAX_KL_DIVERGENCE[precision]
    if has_experts:
        mean_limit, token_limit = SWAPPED_EXPERTS * mean_limit, mean_limit
    if token <= token_limit and mean <= mean_limit:
        return None
    which = "median" if has_experts else "worst"
    return (
        f"its KL divergence from transformers is {mean:.2g} nats per token on average and {token:.2g} for "
        f"the {which} token (limits {mean_limit:g}, {token_limit:g})"
    )


def kl_divergence(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns the Kullback-Leibler divergence of each token's distribution over the columns from the expected
    one, in nats [tokens]. found, expected: logits, [tokens, columns]."""
    # Token by token: those of all tokens would take as much memory as the weights of a small model.
    pairs = (map(_log_probabilities, logits) for logits in zip(expected, found))
    return np.array([(np.exp(expected) * (expected - found)).sum() for expected, found in pairs])


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
