"""Runs that are done: with `--runs DIR` a measurement that was cut short goes on where it was.

A file a run, what its ranks returned, named by all that the run was asked for, the text and the commit. Of a tree with changes
nothing is kept: its commit does not say which code ran.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import report
import text

_folder: Path | None = None


def choose(folder: Path | None) -> None:
    """Names the folder, which need not exist, for this process; None: nothing is kept, and nothing taken. ValueError where the
    tree has changes.
    """
    global _folder
    if folder and not report.commit().isalnum():
        raise ValueError(f"--runs expects a tree without changes, got commit {report.commit()}")
    _folder = folder


def file_of(function: Callable[..., Any], ranks: int, arguments: Mapping[str, Any]) -> Path | None:
    """Where the run of launch.run() with these arguments is kept, or would be; None: nowhere."""
    if _folder is None:
        return None
    asked = (report.commit(), report.versions(), text.about(), function.__module__, function.__qualname__, ranks)
    digest = hashlib.sha256(repr((asked, sorted(arguments.items()))).encode()).hexdigest()
    _folder.mkdir(parents=True, exist_ok=True)
    return _folder / f"{digest[:32]}.json"


def read(file: Path | None) -> list[Any] | None:
    """Returns the ranks' return values, or None if they are not kept."""
    return json.loads(file.read_text()) if file and file.exists() else None


def write(file: Path | None, returned: list[Any]) -> None:
    """Keeps it where a run has a file; whole or not at all."""
    if file:
        whole = file.with_suffix(".new")
        whole.write_text(json.dumps(returned))
        whole.replace(file)
