"""Text as bytes: a corpus that is on every machine, its split, and batches that depend on (seed, step, rank) alone."""

from __future__ import annotations

import dataclasses
import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 4_000_000
VALIDATION_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A training and a validation text, each a uint8 vector of values under 128."""

    train: Tensor
    validation: Tensor

    def to(self, device: torch.device) -> Corpus:
        """The same there, and so its batches."""
        return Corpus(self.train.to(device), self.validation.to(device))

    def batch(self, size: int, context: int, *, seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Tokens and the bytes after them, both (size, context) int64; equal arguments give equal batches."""
        # Seeded by a string: Python hashes all of it, where torch's generator would keep 32 bits of a packed number.
        draw = random.Random(f"{seed} {step} {rank}")
        starts = [draw.randrange(len(self.train) - context) for _ in range(size)]
        return windows(self.train, starts, context)

    def validation_batch(self, size: int, context: int, index: int) -> tuple[Tensor, Tensor]:
        """The index-th batch of windows spread evenly over the validation text (index 0, 1, 2, …; wraps around)."""
        count = (len(self.validation) - 1) // context
        # A stride coprime to most counts visits far-apart places first, so few batches already cover the text.
        starts = [(index * size + i) * 617 % count * context for i in range(size)]
        return windows(self.validation, starts, context)


def windows(text: Tensor, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    """Cuts text at starts: (len(starts), context) tokens and, one byte on, targets, both int64."""
    cut = torch.stack([text[start : start + context + 1] for start in starts]).long()
    # Not views of `cut`: stages of torch 2.11 refuse a batch whose strides are not those of the first.
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def load(path: Path | None = None, *, context: int = 64) -> Corpus:
    """Reads a file, every file of a directory, or (None) Python's own standard library; the first 4 MB of them.

    Args:
        path: The text. None reads the sorted `Lib/*.py`, then the sorted `Lib/*/*.py`.
        context: Bytes a window; a text too short for one window in each part is refused.

    Raises:
        ValueError: When there is no such text, or too little of it; one sentence.
    """
    if path is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        found = (*library.glob("*.py"), *library.glob("*/*.py"))
        kept = (file for file in found if file.parent.name not in ("site-packages", "dist-packages"))
        files = sorted(kept, key=lambda file: (len(file.parts), file))
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(f"--data expects a file or a directory, got {path}, which does not exist")
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    split = min(len(text), MAX_BYTES)
    held_out = int(split * VALIDATION_SHARE)
    if held_out <= context:
        needed = int((context + 1) / VALIDATION_SHARE)
        raise ValueError(f"--data expects at least {needed} bytes of text, got {len(text)} in {path or 'Lib'}")
    tokens = torch.frombuffer(text, dtype=torch.uint8)[:split].clamp(max=127)
    return Corpus(train=tokens[:-held_out], validation=tokens[-held_out:])
