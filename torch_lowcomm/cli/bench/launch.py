"""Runs this process as a rank of a launcher, or starts ranks on this machine."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import multiprocessing

TIMEOUT = timedelta(seconds=120)  # progress deadline of every wait
GRACE_S = TIMEOUT.total_seconds() + 10  # for the other ranks to report their errors, once a rank has failed
Rank = Callable[[Any], int]


def launched() -> bool:
    """Whether a launcher such as torchrun has made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_rank(function: Rank, arguments: Any) -> NoReturn:
    """Runs as one rank: joins the group, calls `function(arguments)`, and ends this process with the status that it returns; 2
    after a ValueError, which all ranks have and rank 0 prints; 1 after a failure of a peer or the network, which every rank
    prints.
    """
    who = int(os.environ["RANK"])
    try:
        dist.init_process_group("lowcomm", timeout=TIMEOUT)
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
    sys.stdout.flush()
    os._exit(status)  # torch's own gloo, if it was measured, may abort when its process ends


def say(problem: str, command: str = "bench") -> None:
    """Prints one line on stderr."""
    print(f"torch_lowcomm {command}: " + " ".join(problem.split()), file=sys.stderr, flush=True)


def local_ranks(function: Rank, arguments: Any, *, ranks: int) -> int:
    """Starts ranks on this machine, of an importable function and arguments that can be pickled, and returns the exit status
    of the first that failed, or 0; no process remains. Those that still run GRACE_S after it are ended.
    """
    # The parent has the store, as with torchrun, so that no port is chosen before it is bound.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = multiprocessing.spawn(_enter, (ranks, store.port, function, arguments), ranks, join=False, daemon=True)
    try:
        while not started.join(grace_period=GRACE_S):
            pass
    except multiprocessing.ProcessExitedException as error:
        if error.exit_code < 0:
            say(str(error))
        return max(error.exit_code, 1)
    return 0


def _enter(rank: int, ranks: int, port: int, function: Rank, arguments: Any) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does
    run_rank(function, arguments)
