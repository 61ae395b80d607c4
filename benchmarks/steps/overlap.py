"""How much of QSDP's communication a step waits for on a slow link, with and without overlap.

Two ranks, each on a host of linklab, train a byte-level GPT of about 10 M parameters by FSDP2 under `lc.fsdp.quantize`.
One after the other, in turn and within each repetition: steps without overlap, steps with it, and steps of the same model
on each rank by itself (no communication). Exposed communication is a step's time less that of the last. As root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import data
import model
import torch
import torch.distributed as dist
from linklab.lab import Lab
from linklab.validate import ON_HOSTS
from measure import sent_bytes
from report import Gate, finish, heading
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import torch_lowcomm as lc
from steps.overlap_trace import exposed_ms

RANKS, SEED, TRACED = 2, 0, 5
TURN, OVERLAP, ALONE = "in turn", "overlap", "no communication"
SIZE = model.Config(width=320, layers=8, heads=8, context=128)  # 9.9 M parameters
FEWER_EXPOSED = 0.30  # the claim


def wrapped(overlap: bool | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model, the same on every rank, and its optimizer; None: not wrapped."""
    torch.manual_seed(SEED)
    gpt = model.GPT(SIZE)
    if overlap is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(gpt, mesh=mesh)
        lc.fsdp.quantize(gpt, overlap=overlap)
    return gpt, torch.optim.AdamW(gpt.parameters(), lr=3e-4, fused=True)


def rank_main(job: dict[str, Any], result: Path) -> None:
    """Runs one host's part; returns the times of every way's steps, their losses, bytes and traces."""
    torch.set_num_threads(1)
    dist.init_process_group("lowcomm", timeout=timedelta(seconds=120))
    corpus, rank = data.load(), dist.get_rank()
    ways = {TURN: wrapped(False), OVERLAP: wrapped(True), ALONE: wrapped(None)}
    step_of, rows = dict.fromkeys(ways, 0), {way: {"seconds": [], "loss": [], "bytes": 0} for way in ways}

    def step(way: str) -> None:
        gpt, optimizer = ways[way]
        tokens = corpus.batch(job["batch"], SIZE.context, seed=SEED, step=step_of[way], rank=rank)
        step_of[way] += 1
        dist.barrier()
        before, start = sent_bytes("all_gather") + sent_bytes("reduce_scatter"), time.monotonic()
        loss = gpt(*tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()  # a step is over when it is on both ranks
        rows[way]["seconds"].append(time.monotonic() - start)
        rows[way]["loss"].append(loss.item())
        rows[way]["bytes"] = sent_bytes("all_gather") + sent_bytes("reduce_scatter") - before

    for _ in range(job["warm_up"] + job["repetitions"]):
        for way in ways:
            step(way)
    for way in (TURN, OVERLAP) * TRACED:
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            step(way)
        rows[way].setdefault("traced_exposed_ms", []).append(exposed_ms(trace.events()))
        if rank == 0 and job["trace"]:
            trace.export_chrome_trace(f"{job['trace']}.{way.replace(' ', '_')}.json")
    for row in rows.values():
        row["seconds"] = row["seconds"][job["warm_up"] : job["warm_up"] + job["repetitions"]]
    result.write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a rank on each host of a lab; what each measured."""
    with tempfile.TemporaryDirectory(prefix="lowcomm-") as name:
        path = Path(name) / "job.json"
        path.write_text(json.dumps(job))
        with Lab(hosts=RANKS, rate=job["rate"]) as lab:
            ended = lab.run(
                [sys.executable, "-m", "steps.overlap", "--rank-of", str(path)],
                timeout_s=job["deadline_s"],
                env=ON_HOSTS,
            )
        if failed := [f"rank {rank}:\n{end.output[-3000:]}" for rank, end in enumerate(ended) if end.code]:
            raise RuntimeError("expected exit code 0 on every rank\n" + "\n".join(failed))
        return [json.loads(path.with_name(f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def main() -> int:
    """Runs, prints a row a way, and the gates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit", help="of each host's link")
    parser.add_argument("--batch", type=int, default=8, help="windows of 128 bytes a rank")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="rank 0's Chrome traces: TRACE.in_turn.json, TRACE.overlap.json")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        job = json.loads(arguments.rank_of.read_text())
        rank_main(job, arguments.rank_of.with_name(f"rank{os.environ['RANK']}.json"))
        return 0
    job = {key: getattr(arguments, key) for key in ("rate", "batch", "repetitions")}
    job |= {"warm_up": 2, "deadline_s": 600, "trace": str(arguments.trace.resolve()) if arguments.trace else ""}
    elements = sum(p.numel() for p in model.GPT(SIZE).parameters())
    print(heading("overlap", parameters=elements, **{key: job[key] for key in ("rate", "batch", "repetitions")}))
    ranks = measure(job)

    slower = {
        way: [max(pair) for pair in zip(*(rank[way]["seconds"] for rank in ranks), strict=True)] for way in ranks[0]
    }
    print(f"# {'steps':<18}{'ms a step':>11}{'spread':>9}{'exposed ms':>12}{'traced ms':>11}{'MB a step':>11}")
    content: dict[str, Any] = {"job": job, "parameters": elements, "rows": {}}
    for way in (TURN, OVERLAP, ALONE):
        times = slower[way]
        traced = [rank[way].get("traced_exposed_ms", [0.0]) for rank in ranks]
        row = {
            "ms": 1e3 * statistics.median(times),
            "spread": statistics.quantiles(times, n=4)[2] / statistics.quantiles(times, n=4)[0] - 1,
            # Within a repetition, whose steps shared the machine's load.
            "exposed_ms": 1e3 * statistics.median(t - alone for t, alone in zip(times, slower[ALONE], strict=True)),
            "traced_exposed_ms": statistics.median(max(pair) for pair in zip(*traced, strict=True)),
            "bytes": max(rank[way]["bytes"] for rank in ranks),
            "seconds": times,
        }
        content["rows"][way] = row
        print(
            f"  {way:<18}{row['ms']:>11.1f}{row['spread']:>9.1%}{row['exposed_ms']:>12.1f}"
            f"{row['traced_exposed_ms']:>11.1f}{row['bytes'] / 1e6:>11.2f}"
        )
    rows = content["rows"]
    # Draws of gradients are a model's own, so that only the first loss is the same; the tests compare bits.
    last = [statistics.mean(rank[way]["loss"][-1] for rank in ranks) for way in (TURN, OVERLAP)]
    first = sum(rank[TURN]["loss"][0] != rank[OVERLAP]["loss"][0] for rank in ranks)
    gates = [
        Gate(
            "exposed communication, overlap / in turn",
            rows[OVERLAP]["exposed_ms"] / rows[TURN]["exposed_ms"],
            "<=",
            1 - FEWER_EXPOSED,
        ),
        Gate(
            "the same by traces: an op under way and nothing computing",
            rows[OVERLAP]["traced_exposed_ms"] / rows[TURN]["traced_exposed_ms"],
            "<=",
            1 - FEWER_EXPOSED,
        ),
        Gate("bytes a step, overlap / in turn", rows[OVERLAP]["bytes"] / rows[TURN]["bytes"], "==", 1),
        Gate("ranks whose first loss is another with overlap", first, "==", 0),
        Gate("last loss, overlap / in turn - 1", abs(last[1] / last[0] - 1), "<=", 0.02),
    ]
    return finish(gates, arguments.json, content)


if __name__ == "__main__":
    sys.exit(main())
