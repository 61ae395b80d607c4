"""One site, run on every host: `python -m diloco.late_rank JOB.json`; writes when its outer steps began, and its loss."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta

import data
import model
import torch
import torch.distributed as dist
from linklab.job import job_of_host
from steps.cases import MODELS

import torch_lowcomm as lc
from diloco.late import BEFORE
from diloco.rank import validation


def _stand_still(seconds: float) -> None:
    """Stops this process, which another one wakes up."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    """Trains until the others' last outer step."""
    job, finish = job_of_host()
    torch.set_num_threads(1)
    rank, sites, seed = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), job["seed"]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], 29401, is_master=rank == 0, wait_for_workers=False)
    members = lc.Membership(store, f"site{rank}", min_machines=2, timeout=timedelta(minutes=30))
    while len(members.alive()) < sites:  # the first group has all of them
        time.sleep(0.1)
    torch.manual_seed(seed)
    gpt = model.GPT(model.Config(**MODELS[job["model"]]))
    quorum = {"quorum": sites - 1} if job["quorum"] else {}
    inner = torch.optim.AdamW(gpt.parameters(), lr=1e-3, fused=True)
    opt = lc.DiLoCoX(inner, job["every"], mode="sync", codec="gauss2", model=gpt, group=members, **quorum)
    corpus, context = data.load(), MODELS[job["model"]]["context"]
    times: list[float] = []  # of outer steps, and how many sites were in the group
    counts: list[int] = []
    loss = None
    stops, step = job["stops"] and rank == sites - 1, 0
    last = job["steps"] + 2  # and the loss is taken before
    while opt.report["outer_steps"] < last or len(members.formed.machines) < sites:
        began, before = time.monotonic(), opt.report["outer_steps"]
        gpt(*corpus.batch(job["batch"], context, seed=seed, step=step, rank=rank)).backward()
        step += 1
        time.sleep(max(0.0, began + job["step_s"] - time.monotonic()))
        try:
            opt.step()
        except dist.DistBackendError:
            opt.regroup()
        if opt.regroup_due:
            opt.regroup()
        inner.zero_grad()
        if opt.report["outer_steps"] > before:
            times.append(time.monotonic())
            counts.append(len(members.formed.machines))
            if rank == 0 and opt.report["outer_steps"] == job["steps"]:
                with opt.outer_parameters():
                    loss = validation(gpt, corpus, context)
            if stops and len(times) == BEFORE:
                stops = False
                time.sleep(job["every"] * job["step_s"] / 2)
                _stand_still(job["stopped"] * job["every"] * job["step_s"])
    opt.finish()
    finish({"times": times, "sites": counts, "loss": loss, "late_samples": opt.report["late_samples"]})
    members.leave()
    store.set(f"done{rank}", "")
    if rank == 0:  # its process has the store
        store.wait([f"done{other}" for other in range(sites)], timedelta(minutes=2))


if __name__ == "__main__":
    main()
