"""The device that a rank trains on."""

from __future__ import annotations

import argparse
import os

import torch


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: the GPU of torchrun's LOCAL_RANK, counted round where there are fewer",
    )


def choose(name: str) -> torch.device:
    """The device of that name, made the current one: before any DeviceMesh, which would choose for itself.

    Raises:
        ValueError: There is no GPU; one sentence.
    """
    if name == "cpu":
        return torch.device("cpu")
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count == 0:
        raise ValueError("--device cuda expects a GPU, got none")
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > count:  # NCCL serves no two ranks of one GPU
        os.environ.setdefault("LOWCOMM_NCCL", "0")
    torch.cuda.set_device(number % count)
    return torch.device("cuda", number % count)
