"""Fashion-MNIST from its IDX files, and its images dealt to clients whose classes differ."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy
import torch
from torch import Tensor

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
_MAGIC = {1: 2049, 3: 2051}  # by dimensions, of unsigned bytes


def load(folder: Path | None, *, train: bool) -> tuple[Tensor, Tensor]:
    """Images, float32 [N, 1, 28, 28] of mean 0 and deviation 1, and labels, int64 [N].

    Args:
        folder: That has `train-images-idx3-ubyte` and the others, plain or `.gz`; None: of Debian's dataset-fashion-mnist.
        train: The 60,000 of the training set, or the 10,000 of the test set.

    Raises:
        ValueError: There are no such files, or they are something else; one sentence.
    """
    if folder is None and not DEBIAN.exists():
        raise ValueError("expected --data FOLDER with Fashion-MNIST's files, or Debian's package dataset-fashion-mnist")
    folder = folder or DEBIAN
    name = "train" if train else "t10k"
    images = _idx(folder, f"{name}-images-idx3-ubyte", 3).float().unsqueeze(1) / 255
    labels = _idx(folder, f"{name}-labels-idx1-ubyte", 1).long()
    if len(images) != len(labels):
        raise ValueError(f"--data expects a label for each of {len(images)} images in {folder}, got {len(labels)}")
    return (images - 0.286) / 0.353, labels


def deal(labels: Tensor, clients: int, *, concentration: float, seed: int) -> list[Tensor]:
    """The images of each client, int64: each class is split in shares drawn from a Dirichlet distribution.

    Args:
        labels: int64 [N].
        clients: How many.
        concentration: Of the distribution: clients' classes differ the more the smaller it is.
        seed: Of the shares and the order.
    """
    generator = numpy.random.default_rng(seed)
    dealt: list[list[int]] = [[] for _ in range(clients)]
    for label in labels.unique().tolist():
        numbers = generator.permutation((labels == label).nonzero().flatten().numpy())
        ends = (generator.dirichlet([concentration] * clients).cumsum() * len(numbers)).round().astype(int)
        for client, part in enumerate(numpy.split(numbers, ends[:-1])):
            dealt[client] += part.tolist()
    return [torch.tensor(sorted(numbers), dtype=torch.int64) for numbers in dealt]


def _idx(folder: Path, name: str, dimensions: int) -> Tensor:
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.exists():
        read = plain.read_bytes()
    elif packed.exists():
        read = gzip.decompress(packed.read_bytes())
    else:
        raise ValueError(f"--data expects {name} or {name}.gz in {folder}, got neither")
    bytes_of_head = 4 * (dimensions + 1)
    head = numpy.frombuffer(read[:bytes_of_head].ljust(bytes_of_head, b"\0"), dtype=">i4")
    if head[0] != _MAGIC[dimensions] or numpy.prod(head[1:]) != len(read) - bytes_of_head:
        raise ValueError(f"--data expects an IDX file of {dimensions} dimensions, got another one: {plain}")
    content = numpy.frombuffer(read, dtype=numpy.uint8, offset=bytes_of_head)
    return torch.from_numpy(content.copy()).view(*head[1:].tolist())
