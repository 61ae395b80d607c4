"""One rank of throughput.py, on every host `python -m diloco.throughput_rank JOB.json`."""

from __future__ import annotations

import os
import time
from typing import Any

import data
import model
import torch
import torch.distributed as dist
from convergence.diloco.rank import SHAPE, Configuration, trainer
from linklab.job import job_of_host


def turn(row: dict[str, Any], corpus: data.Corpus, rank: int) -> float:
    """Trains a new model for `untimed` steps, then `timed` ones; seconds of these, without a last message's way."""
    c = Configuration(**row["configuration"])
    torch.manual_seed(c.seed)
    gpt = model.GPT(SHAPE)
    if row["alone"]:
        trained, optimizer = gpt, torch.optim.AdamW(gpt.parameters(), lr=c.lr, fused=True)
    else:
        trained, optimizer, _ = trainer(gpt, c)
    start = time.monotonic()
    for step in range(row["untimed"] + row["timed"]):
        if step == row["untimed"]:
            start = time.monotonic()
        trained(*corpus.batch(c.batch, SHAPE.context, seed=c.seed, step=step, rank=rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.monotonic() - start
    if c.outer or c.cocktail:
        optimizer.finish()
    dist.barrier()  # no row starts while the link carries another one's last message
    return seconds


def main() -> None:
    """Takes the rows in turn, and writes the seconds of each: a list a row."""
    job, finish = job_of_host()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("lowcomm", init_method="env://", rank=rank, world_size=2)
    corpus = data.load()
    seconds: list[list[float]] = [[] for _ in job["rows"]]
    for _ in range(job["repetitions"]):
        for row, of_row in zip(job["rows"], seconds, strict=True):
            of_row.append(turn(row, corpus, rank))
    dist.destroy_process_group()
    finish(seconds)


if __name__ == "__main__":
    main()
