"""Runs one function in several real processes, with a deadline, and brings back what each returned."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept


def _enter(
    function: Callable[..., Any],
    rank: int,
    directory: Path,
    plain: bool,
    environment: dict[str, str],
    arguments: dict[str, Any],
) -> None:
    import torch

    os.environ.update(environment)  # the fork server's is as old as the first run
    torch.set_num_threads(1)
    result = function(rank, (directory / "rendezvous").as_uri(), **arguments)
    (directory / f"{rank}.json").write_text(json.dumps(result))
    if plain:
        # Plain gloo may abort as its process ends, after everything is done and destroyed: skip its teardown.
        sys.stdout.flush()
        os._exit(0)


def run(
    function: Callable[..., Any], *, ranks: int, deadline_s: float, plain_gloo: bool = False, **arguments: Any
) -> list[Any]:
    """Calls `function(rank, init_method, **arguments)` in `ranks` processes on this machine, or takes what kept.py has of it.

    The function is importable by name, its arguments can be pickled, its result is JSON, and `init_method` is a fresh file
    store's address. With `plain_gloo` the ranks talk over torch's own gloo, whose exit is not waited for. Returns the results
    by rank. A rank that fails and a deadline that passes are a RuntimeError; no process is left behind.
    """
    file = kept.file_of(function, ranks, arguments)
    if (done := kept.read(file)) is not None:
        return done
    # Forked from a process that has imported torch and done nothing else: importing it takes longer than a short run.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch_lowcomm.diloco", "torch_lowcomm.fsdp", "torch_lowcomm.pipeline", "torch_lowcomm.subspace"]
    )
    with tempfile.TemporaryDirectory(prefix="lowcomm-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        processes = [
            context.Process(target=_enter, args=(function, rank, directory, plain_gloo, dict(os.environ), arguments))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
            stack.callback(_end, process)
        deadline = time.monotonic() + deadline_s
        while any(process.exitcode is None for process in processes):
            failed = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode}
            if failed:
                raise RuntimeError(f"{function.__name__}: expected exit code 0 on every rank, got {failed}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{function.__name__}: expected to finish within {deadline_s:.0f} s, did not")
            time.sleep(0.05)
        failed = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode}
        if failed:
            raise RuntimeError(f"{function.__name__}: expected exit code 0 on every rank, got {failed}")
        returned = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(ranks)]
    kept.write(file, returned)
    return returned


def _end(process: multiprocessing.process.BaseProcess) -> None:
    process.kill()
    process.join()
