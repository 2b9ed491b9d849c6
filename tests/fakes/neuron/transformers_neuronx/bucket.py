"""Which sizes programs are compiled for."""

from __future__ import annotations


def token_sizes(n_positions: int | list[int]) -> list[int]:
    """A list as it is; a number: 128, doubled until it is reached, then the number itself."""
    if isinstance(n_positions, list):
        return sorted(n_positions)
    sizes, size = [], 128
    while size < n_positions:
        sizes.append(size)
        size *= 2
    return [*sizes, n_positions]


def context_sizes(estimate: int | list[int] | None, token_buckets: list[int]) -> list[int]:
    """A list as it is; a number: that one; 0: none; None: half of each of `token_buckets`."""
    if isinstance(estimate, list):
        return sorted(estimate)
    if isinstance(estimate, int):
        return [estimate] if estimate > 0 else []
    if estimate is None:
        return [size // 2 for size in token_buckets]
    raise NotImplementedError(f"context_length_estimate={estimate!r}")


def batch_sizes(batch_size: int | list[int]) -> list[int]:
    if isinstance(batch_size, int):
        return [batch_size]
    if isinstance(batch_size, list):
        return sorted(batch_size)
    raise TypeError(f"batch_size is an int or a list of them, not {batch_size!r}")


def find(buckets: list[int], size: int) -> int | None:
    """The smallest bucket that holds `size`, the largest when none does, None when there are none."""
    return next((bucket for bucket in buckets if bucket >= size), buckets[-1]) if buckets else None
