"""Decode steps on a CUDA GPU, recorded once and replayed: one launch for each step, instead of hundreds, each of which takes
Python longer than the GPU.

A CUDA graph does the same again with the same memory and the same shapes. So there is one for each of some numbers of rows and
each of some lengths of the window, a step takes the smallest that it fits into, and tokens, positions and logits have places of
their own. This layer knows neither models nor slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

SHORTEST = 256  # positions; a step that looks at fewer would take a GPU about as long
WARM_UPS = 2  # what libraries set up at their first calls must not be recorded


class RecordingError(Exception):
    """A step that gives something else when it is replayed."""


def sizes_for(batch_size: int, wanted: Sequence[int] | None) -> list[int]:
    """The numbers of rows to record: those wanted that can come, or powers of two and the whole batch. A batch runs on two rows
    at least, where there are as many."""
    powers = (2**n for n in range(batch_size.bit_length()))
    least = min(2, batch_size)
    return sorted({size for size in ((*powers, batch_size) if wanted is None else wanted) if least <= size <= batch_size})


def lengths_for(window: int) -> list[int]:
    """How much of the window steps look at: all of it, and halves of that down to SHORTEST."""
    lengths = [window]
    while lengths[0] >= 2 * SHORTEST:
        lengths.insert(0, -(-lengths[0] // 2))
    return lengths


def record(run: Callable[[], None], pool) -> Callable[[], None]:
    """Records what `run` does on the GPU. Returns what does it again."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph.replay


class RecordedSteps:
    """Steps for each of `sizes` numbers of rows and `lengths`, recorded and compared with what they were made from.

    forward: tokens and positions, int64 [rows, 1] each, and how much of the window is looked at → float32 [rows, vocab], on the
    `device`. It must not wait for the GPU. Raises RecordingError where a replayed step differs by more than `tolerance`, and
    what torch raises where a step cannot be recorded.
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
        sizes: Sequence[int],
        lengths: Sequence[int],
        vocab_size: int,
        device: str,
        tolerance: float,
        record: Callable = record,
    ):
        self._forward, self._sizes, self._lengths = forward, sorted(sizes), sorted(lengths)
        rows = self._sizes[-1]
        self._tokens = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._logits = torch.zeros((rows, vocab_size), device=device)
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        pool = torch.cuda.graph_pool_handle() if self._tokens.is_cuda else None
        for size in reversed(self._sizes):  # the largest first: the others fit into the memory that it took
            for length in reversed(self._lengths):
                self._replays[size, length] = record(lambda size=size, length=length: self._run(size, length), pool)
                self._check(size, length, tolerance)

    def __len__(self) -> int:
        return len(self._replays)

    def rows_for(self, rows: int) -> int | None:
        """How many rows a step on so many has to be given; None where none was recorded for as many."""
        return next((size for size in self._sizes if size >= rows), None)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """int64 [rows] each, as many as `rows_for` says, and the least of the window that has to be looked at → float32 [rows,
        vocab] on the device, until the next step."""
        rows = len(tokens)
        self._tokens[:rows, 0].copy_(tokens)
        self._positions[:rows, 0].copy_(positions)
        self._replays[rows, next(length for length in self._lengths if length >= longest)]()
        return self._logits[:rows]

    def _run(self, rows: int, length: int) -> None:
        self._logits[:rows].copy_(self._forward(self._tokens[:rows], self._positions[:rows], length))

    def _check(self, rows: int, length: int, tolerance: float) -> None:
        places = torch.arange(rows)
        tokens, positions = places % self._logits.shape[1], (length - 1 - places).clamp_min(0)
        found = self(tokens, positions, length).clone()
        self._logits.zero_()
        self._run(rows, length)
        error = (found - self._logits[:rows]).abs().max().item()
        if not error <= tolerance:
            raise RecordingError(f"a step of {rows} rows gives logits that differ by {error:.2g} when it is replayed")
