"""One rank of the timing, run on every host: `python -m steps.rank JOB.json`; writes what it measured next to it."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import model
import text
import torch
import torch.distributed as dist
from linklab.job import job_of_host
from linklab.rank import interface_sent
from torch import nn

import torch_lowcomm as lc
from steps.cases import MODELS, Case
from steps.wrapped import WRAP

# DDP makes its buckets anew and PowerSGD begins in the first steps; a hook's own warm start comes in them too.
WARM_UP = 4


class Way:
    """One case's model, optimizer and group, or the same model by itself: what a step computes."""

    def __init__(self, case: Case | None, job: dict[str, Any]) -> None:
        torch.manual_seed(0)
        gpt: nn.Module = model.GPT(model.Config(**MODELS[job["model"]]))
        if case is not None:
            options = lc.Options(policy="") if case.backend == "lowcomm" else None
            timeout = timedelta(seconds=600)
            group = dist.new_group(backend=case.backend, timeout=timeout, pg_options=options)
            gpt = WRAP[job["method"]](case, gpt, group)
        self.gpt = gpt
        self.optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, fused=True)
        self.seconds: list[float] = []
        self.sent: list[int] = []
        self.loss = float("nan")

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], *, counted: bool) -> None:
        """One step, timed from when both ranks are there."""
        dist.barrier()
        sent, start = interface_sent(), time.monotonic()
        loss = self.gpt(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()
        if counted:
            self.seconds.append(time.monotonic() - start)
            self.sent.append(interface_sent() - sent)


def main() -> None:
    """Times every case, step by step in turn, and what a step computes among them."""
    job, finish = job_of_host()
    logging.getLogger("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ways = [Way(None, job), *(Way(Case(**case), job) for case in job["cases"])]
    corpus, context = text.load(), MODELS[job["model"]]["context"]
    for step in range(WARM_UP + job["repetitions"]):
        batch = corpus.batch(job["batch"], context, seed=0, step=step, rank=rank)
        for way in ways:
            way.step(batch, counted=step >= WARM_UP)
    rows = [{"seconds": way.seconds, "sent": way.sent, "loss": way.loss} for way in ways]
    finish(rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
