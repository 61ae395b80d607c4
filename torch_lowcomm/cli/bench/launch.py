"""Runs this process as a rank of a launcher, or starts ranks on this machine, with deadlines."""

import contextlib
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=120)  # progress deadline of every wait
GRACE_S = TIMEOUT.total_seconds() + 10  # for the other ranks to report their errors, once a rank has failed
Rank = Callable[..., int]


def launched() -> bool:
    """Whether a launcher such as torchrun has made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank(function: Rank, arguments: Any) -> int:
    """Runs as one rank: joins the group, calls `function(arguments)`, leaves. Returns its exit status; 2 after a ValueError,
    which all ranks have and rank 0 prints; 1 after a failure of a peer or the network, which every rank prints.
    """
    from torch_lowcomm._C import Options

    who = int(os.environ["RANK"])
    try:
        dist.init_process_group("lowcomm", pg_options=Options(""), timeout=TIMEOUT)
        status = function(arguments)
        dist.barrier()
        dist.destroy_process_group()
    except ValueError as error:
        if who == 0:
            say(str(error))
        status = 2
    except (RuntimeError, OSError) as error:
        say(f"rank {who}: {error}")
        status = 1
    return status


def say(problem: str, command: str = "bench") -> None:
    """Prints one line on stderr."""
    print(f"torch_lowcomm {command}: " + " ".join(problem.split()), file=sys.stderr, flush=True)


def local_ranks(function: Rank, arguments: Any, *, ranks: int) -> int:
    """Starts ranks on this machine, of an importable function and arguments that can be pickled, and returns the largest exit
    status; no process remains. Those that still run GRACE_S after a rank failed are ended, with status 1.
    """
    # The parent has the store, as with torchrun, so that no port is chosen before it is bound.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    environment = {
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1),
    }
    processes = []
    try:
        for r in range(ranks):
            of_rank = {**environment, "RANK": r, "LOCAL_RANK": r}
            process = context.Process(target=_enter, args=(function, arguments, of_rank), daemon=True)
            process.start()
            processes.append(process)
        return _watch(processes)
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
            process.join()


def _watch(processes: list[Any]) -> int:
    end = math.inf
    while running := [p for p in processes if p.exitcode is None]:
        if any(p.exitcode for p in processes):
            end = min(end, time.monotonic() + GRACE_S)
        if time.monotonic() > end:
            left = [r for r, p in enumerate(processes) if p.exitcode is None]
            say(
                f"expected all ranks to end within {GRACE_S:g} s of the first that failed, got ranks {left} still there"
            )
            return 1
        connection.wait([p.sentinel for p in running], timeout=0.2)
    for r, process in enumerate(processes):
        if process.exitcode < 0:
            say(f"expected rank {r} to end by itself, got signal {-process.exitcode}")
    return max(1 if p.exitcode < 0 else p.exitcode for p in processes)


def _enter(function: Rank, arguments: Any, environment: dict[str, Any]) -> None:
    os.environ.update({key: str(value) for key, value in environment.items()})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    leave(rank(function, arguments))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    with contextlib.suppress(OSError):
        connection.wait([parent.sentinel] if parent else [])
    os._exit(1)


def leave(status: int) -> None:
    """Ends this rank at once: torch's own gloo, if it was measured, may abort when its process ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
