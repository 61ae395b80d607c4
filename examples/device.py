"""The device that a rank trains on."""

from __future__ import annotations

import argparse
import os

import torch


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the GPU of torchrun's LOCAL_RANK"
    )


def choose(name: str) -> torch.device:
    """The device of that name, made the current one: before any DeviceMesh, which would choose for itself.

    Raises:
        ValueError: Where there is no such GPU; one sentence.
    """
    if name == "cpu":
        return torch.device("cpu")
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise ValueError(f"--device cuda expects a GPU for local rank {number}, got {count} GPUs")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)
