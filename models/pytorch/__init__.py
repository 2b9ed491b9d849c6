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
        # The device files first: importing torch takes seconds. dxg is the GPU's in WSL.
        """Whether torch finds a CUDA GPU. Imports torch, which takes seconds, only if there are device files
        of a GPU. Raises ModelError if `wanted` is "cuda" and there is no GPU."""
        is_here = any(path.name == "dxg" or path.name.startswith("nvidia") for path in Path("/dev").iterdir())
        is_here = is_here and bool(find_spec("torch"))
        if is_here:
            import torch

            is_here = torch.cuda.is_available()
        if wanted == "cuda" and not is_here:
            raise ModelError(
                "--device cuda: torch finds no CUDA GPU on this machine; use --device cpu or auto"
            )
        return is_here

    @staticmethod
    def memory_bytes() -> int | None:
        import torch

        return torch.cuda.mem_get_info()[1]

    def fetch_weights(self) -> None:
        fetch_checked_weights(self.config, self.folder, self)

    def load(self, announce: Announce) -> StaticBatchModel:
        from models.pytorch.model import TorchModel

        return TorchModel(self.config, self.folder, self.device)
