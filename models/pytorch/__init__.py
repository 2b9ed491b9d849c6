"""The engine for CUDA GPUs, and for what OpenVINO cannot convert, in plain PyTorch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from models.base import Announce, Engine, StaticBatchModel
from models.checkpoint.source import fetch_checked_weights
from models.errors import ModelError


class PyTorch(Engine):
    device = "cuda"
    name = "plain PyTorch"

    @staticmethod
    def is_here(wanted: str) -> bool:
        """Whether torch finds a CUDA GPU. Imports torch, which takes seconds, only if there are device files
        of a GPU. Raises ModelError if `wanted` is "cuda", and torch finds no GPU or is not installed."""
        has_torch = find_spec("torch") is not None
        has_files = any(Path("/dev").glob("nvidia*")) or Path("/dev/dxg").exists()  # dxg: in WSL
        if has_torch and has_files:
            import torch

            if torch.cuda.is_available():
                return True
        if wanted == "cuda":
            why = "torch finds no CUDA GPU on this machine" if has_torch else "torch is not installed here"
            raise ModelError(f"--device cuda: {why}; use --device cpu or auto")
        return False

    @staticmethod
    def memory_bytes() -> int | None:
        import torch

        return torch.cuda.mem_get_info()[1]

    def fetch_weights(self) -> None:
        fetch_checked_weights(self.config, self.folder, self)

    def load(self, announce: Announce) -> StaticBatchModel:
        from models.pytorch.model import TorchModel

        return TorchModel(self.config, self.folder, self.device)
