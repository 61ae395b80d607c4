"""One rank of the timing, run on every host: `python -m diloco.rank JOB.json`; writes what it measured next to it."""

from __future__ import annotations

import itertools
import time
from typing import Any

import data
import model
import torch
import torch.distributed as dist
from linklab.job import job_of_host
from linklab.rank import interface_sent
from steps.cases import MODELS
from torch import nn

import torch_lowcomm as lc
from diloco.cases import Case
from diloco.loops import Alone, InnerEnd, Lowcomm
from diloco.torchft_loop import Torchft

LOOPS = {"alone": Alone, "lowcomm": Lowcomm, "torchft": Torchft}
_VALIDATION = (4, 16)  # batches, windows each
_WARM_UP = 5  # steps


def validation(gpt: nn.Module, corpus: data.Corpus, context: int) -> float:
    """Mean cross entropy in nats a byte."""
    batches, windows = _VALIDATION
    with torch.no_grad():
        return sum(gpt(*corpus.validation_batch(windows, context, i)).item() for i in range(batches)) / batches


def run(case: Case, job: dict[str, Any], corpus: data.Corpus, seed: int) -> dict[str, Any]:
    """A training of so many rounds from the seed's start; the first round is not timed."""
    config = MODELS[job["model"]]
    torch.manual_seed(seed)
    gpt = model.GPT(model.Config(**config))
    inner = torch.optim.AdamW(gpt.parameters(), lr=1e-3, fused=True)
    inner_end = InnerEnd(inner)
    loop = LOOPS[case.loop](case, gpt, inner, job)
    rank, rounds = dist.get_rank(), []
    lc.reset_stats()
    dist.barrier()
    sent = interface_sent()
    every = job["every"]
    first = _WARM_UP if case.loop == "alone" else every  # which has nothing under way as the second round begins
    for begin in (0, *range(first, first + (job["rounds"] - 1) * every, every)):
        start, waited, after_inner = time.perf_counter(), [loop.waited_s], 0.0
        for step in range(begin, begin + every if begin else first):
            gpt(*corpus.batch(job["batch"], config["context"], seed=seed, step=step, rank=rank)).backward()
            loop.step()
            after_inner += time.perf_counter() - inner_end.at
            waited.append(loop.waited_s)
            inner.zero_grad()
        of_steps = [after - before for before, after in itertools.pairwise(waited)]
        seconds, waited_s = time.perf_counter() - start, sum(of_steps)
        rounds.append({"s": seconds, "waited_s": waited_s, "waits": of_steps, "local_s": after_inner - waited_s})
    loop.finish()
    outer = [ops["outer_step"] for ops in lc.stats().values() if "outer_step" in ops]
    result = {
        "rounds": rounds[1:],
        "sent": (interface_sent() - sent) / job["rounds"],
        "coding_s": sum(op["encode_s"] + op["decode_s"] for op in outer) / job["rounds"],
        "loss": validation(gpt, corpus, config["context"]),
    }
    dist.barrier()
    loop.close()
    return result


def main() -> None:
    """Every case in turn, once a seed."""
    job, finish = job_of_host()
    torch.set_num_threads(1)
    dist.init_process_group("lowcomm")
    corpus = data.load()
    cases = [Case(**case) for case in job["cases"]]
    runs: list[list[dict[str, Any]]] = [[] for _ in cases]
    for seed in job["seeds"]:
        for case, of_case in zip(cases, runs, strict=True):
            of_case.append(run(case, job, corpus, seed))
    finish({"runs": runs, "context": MODELS[job["model"]]["context"]})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
