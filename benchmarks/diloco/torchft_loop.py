"""torchft's DiLoCo and Streaming DiLoCo over gloo: a replica group of one rank a host, a lighthouse on the first.

PyPI `torchft-nightly`; nothing of it is changed but that the waiting of its manager is timed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import logging
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from diloco.cases import MOMENTUM, OUTER_LR, Case

if TYPE_CHECKING:
    from torchft.manager import Manager

_LONG = timedelta(minutes=15)  # of anything: an average takes half a minute at 10 Mbit/s
_FIRST_PORT = 29600
_lighthouse: list[Any] = []  # kept alive


def available() -> bool:
    """Whether torchft can be imported."""
    return importlib.util.find_spec("torchft") is not None


def version() -> str:
    """Of what is installed under either of its names; "absent"."""
    for name in ("torchft-nightly", "torchft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "absent"


def _manager(addresses: list[str], port: int, rank: int) -> Manager:
    """Of this replica group, one of as many as there are addresses, with a store of its own.

    Its `waited_s` are the seconds that its calls blocked.
    """
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    class TimedManager(Manager):
        waited_s = 0.0

        def _timed(self, call: Any, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.waited_s += time.perf_counter() - start

        def start_quorum(self, *args: Any, **options: Any) -> None:
            self._timed(super().start_quorum, *args, **options)

        def should_commit(self, *args: Any, **options: Any) -> bool:
            return self._timed(super().should_commit, *args, **options)

        def allreduce(self, *args: Any, **options: Any) -> Any:
            work, timed = super().allreduce(*args, **options), self._timed

            class TimedWork:
                def wait(self) -> bool:
                    return timed(work.wait)

            return TimedWork()

    address = addresses[rank]
    store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    manager = TimedManager(
        pg=ProcessGroupGloo(timeout=_LONG),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=len(addresses),
        use_async_quorum=False,  # as DiLoCo requires
        timeout=_LONG,
        quorum_timeout=_LONG,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=port,
        lighthouse_addr=f"http://{addresses[0]}:{_FIRST_PORT}",
        replica_id=f"host{rank}_",
        hostname=address,
        init_sync=False,  # the models are equal
    )
    manager.kept = store
    return manager


class Torchft:
    """`torchft.local_sgd.DiLoCo`, each fragment a part of the blocks in order."""

    def __init__(self, case: Case, gpt: nn.Module, inner: torch.optim.Optimizer, job: dict[str, Any]) -> None:
        rank, addresses = dist.get_rank(), job["addresses"]
        # The name under which torchft tells others where its stores are; the lab's hosts have one name and no DNS.
        socket.gethostname = lambda: addresses[rank]
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        logging.getLogger("torchft").setLevel(logging.WARNING)
        if rank == 0 and not _lighthouse:
            _lighthouse.append(LighthouseServer(bind=f"0.0.0.0:{_FIRST_PORT}", min_replicas=len(addresses)))
        dist.barrier()
        job["torchft_port"] = job.get("torchft_port", _FIRST_PORT) + 1
        self._manager = _manager(addresses, job["torchft_port"], rank)
        self._parts = _parts(gpt, case.fragments)
        self._inner = inner
        outer = [
            torch.optim.SGD(part.parameters(), lr=OUTER_LR, momentum=MOMENTUM, nesterov=True) for part in self._parts
        ]
        self._diloco = DiLoCo(
            self._manager, self._parts, inner, outer, sync_every=job["every"], fragment_sync_delay=case.delay or 0
        )
        self._diloco.__enter__()

    @property
    def waited_s(self) -> float:
        """For averages, quorums and commits."""
        return self._manager.waited_s

    def step(self) -> None:
        """The inner one, whose hooks do the rest."""
        self._inner.step()

    def finish(self) -> None:
        """Nothing is under way after whole rounds; the outer parameters into the model."""
        self._diloco.__exit__(None, None, None)
        for fragment in self._diloco._fragments:
            fragment.restore_parameters()

    def close(self) -> None:
        """Its manager, whose heartbeats would count as others' bytes."""
        self._manager.shutdown(wait=False)
        self._manager._pg.shutdown()


def _parts(gpt: nn.Module, count: int) -> list[nn.Module]:
    """The model's modules in order, in so many lists of about the same number of blocks."""
    blocks = list(gpt.blocks)
    cuts = [len(blocks) * i // count for i in range(count + 1)]
    parts = [blocks[a:b] for a, b in itertools.pairwise(cuts)]
    parts[0] = [gpt.embed, *parts[0]]
    parts[-1] = [*parts[-1], gpt.norm, gpt.head]
    return [nn.ModuleList(part) for part in parts]
