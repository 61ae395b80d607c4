"""The text that convergence programs train on: Python's own library, or what `--data` names.

A rank is a process of its own, here or on a host of a lab; it finds the name in an environment variable, which it inherits.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import data

_VARIABLE = "LOWCOMM_BENCHMARK_DATA"


def choose(path: Path | None) -> None:
    """Names a file or a directory for this process and those that it starts; None: Python's own library."""
    os.environ.pop(_VARIABLE, None)
    if path:
        os.environ[_VARIABLE] = str(path.resolve())


def load() -> data.Corpus:
    """The chosen text; ValueError, one sentence, when there is none or too little of it."""
    name = os.environ.get(_VARIABLE)
    return data.load(Path(name) if name else None)


def about() -> dict[str, Any]:
    """Describes the chosen text: `name` without its folder, `bytes` that are read of it, the first half of their `sha256`."""
    corpus, name = load(), os.environ.get(_VARIABLE)
    digest = hashlib.sha256(corpus.train.numpy())
    digest.update(corpus.validation.numpy())
    return {
        "name": Path(name).name if name else f"Python {platform.python_version()}'s library",
        "bytes": len(corpus.train) + len(corpus.validation),
        "sha256": digest.hexdigest()[:32],
    }
