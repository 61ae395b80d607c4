"""A site that joins others which train: what it takes over, from whom, how long that lasts, and what the others do meanwhile.

A program of one rank on a host of a lab, too: python -m diloco.site_joins FOLDER STORE_HOST RANK LAYERS INTERVAL_S
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import launch
from linklab.jobs import Job
from linklab.lab import Lab
from linklab.validate import ON_HOSTS

WIDTH, EVERY = 1000, 20
SITES, A_SITE = 3, 2
CODEC = "sym4:bucket=128"
DEADLINE_S = 1200.0
TAKING = "DiLoCoX: take over the outer state"


def on_loopback(rank: int, init_method: str, *, layers: int, interval_s: float) -> dict[str, Any]:
    """A rank of `trains` whose folder is that of `init_method`."""
    folder = Path(init_method.removeprefix("file://")).parent
    return trains(rank, folder, "127.0.0.1", layers=layers, interval_s=interval_s)


def trains(rank: int, folder: Path, store_host: str, *, layers: int, interval_s: float) -> dict[str, Any]:
    """One rank of three sites of two replicas. The third site comes when the others have made two outer steps.

    Inner steps are short until then. From there on an interval lasts `interval_s`.
    """
    import torch
    import torch.distributed as dist

    import torch_lowcomm as lc

    site, place = divmod(rank, A_SITE)
    comes, meeting = site == SITES - 1, folder / "meeting"
    if rank == 0:
        store = dist.TCPStore(store_host, 0, is_master=True, wait_for_workers=False)
        (folder / "port").write_text(str(store.port))
        (folder / "port").rename(meeting)
    while not meeting.exists() or (comes and not (folder / "begun").exists()):
        time.sleep(0.05)
    client = dist.TCPStore(store_host, int(meeting.read_text()), is_master=False)
    patient = timedelta(seconds=DEADLINE_S / 2)
    dist.init_process_group(
        "lowcomm", init_method=f"file://{folder}/site{site}", rank=place, world_size=A_SITE, timeout=patient
    )
    torch.manual_seed(int(comes))
    model = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    least = 1 if comes else SITES - 1
    members = lc.Membership(client, "abc"[site], site=dist.group.WORLD, min_machines=least, timeout=patient)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    opt = lc.DiLoCoX(
        inner, EVERY, model=model, group=members, replicas=dist.group.WORLD, codec=CODEC, mode="sync", check_every=0
    )
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    stood_still_s, made = 0.0, []
    while not comes and len(members.formed.machines) < SITES:
        opt.step()
        if opt.regroup_due:
            start = time.monotonic()
            opt.regroup()
            stood_still_s = time.monotonic() - start
        if rank == 0 and opt.report["outer_steps"] == 2:
            (folder / "begun").touch()
    report = opt.report
    took = (time.monotonic() - report["taken_s"], time.monotonic())
    begun, last = opt.report["outer_steps"], opt.steps
    while opt.report["outer_steps"] == begun:
        time.sleep(interval_s / EVERY)
        opt.step()
        made.append(time.monotonic())
    waited_s = opt.report["waited_s"]
    opt.finish()
    given = [one for record in lc.flight_record().values() for one in record["ops"] if one["op"] == TAKING]
    members.leave()
    dist.barrier()
    dist.destroy_process_group()
    return {
        "site": site,
        "taken_bytes": report["taken_bytes"],
        "given_bytes": sum(one["sent_bytes"] for one in given),
        "taken_s": report["taken_s"],
        "took": took,
        "left_out": last % EVERY,
        "made": made,
        "stood_still_s": stood_still_s,
        "waited_s": waited_s,
    }


def found(layers: int, interval_s: float, rate: str | None) -> dict[str, Any]:
    """Runs all ranks and puts together what they found; `rate`: of every site's link, in a lab; None: on loopback."""
    if rate is None:
        ranks = launch.run(
            on_loopback, ranks=SITES * A_SITE, deadline_s=DEADLINE_S, layers=layers, interval_s=interval_s
        )
    else:
        ranks = _in_lab(layers, interval_s, rate)
    old, new = ranks[:-A_SITE], ranks[-A_SITE:]
    begin, end = min(one["took"][0] for one in new), max(one["took"][1] for one in new)
    return {
        "rate": rate or "loopback",
        "taken_bytes": sum(one["taken_bytes"] for one in new),
        "given_bytes": [sum(one["given_bytes"] for one in old if one["site"] == site) for site in range(SITES - 1)],
        "taken_s": max(one["taken_s"] for one in new),
        "stood_still_s": max(one["stood_still_s"] for one in old),
        "steps_meanwhile": min(sum(begin <= at <= end for at in one["made"]) for one in old),
        "left_out": new[0]["left_out"],
        "waited_s": max(one["waited_s"] for one in old),
    }


def _in_lab(layers: int, interval_s: float, rate: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="lowcomm-joins-") as folder, Lab(hosts=SITES, rate=rate) as lab:
        jobs: list[Job] = []
        environment = {**ON_HOSTS, "LOWCOMM_POLICY": "", "GLOO_SOCKET_IFNAME": "eth0"}
        for rank in range(SITES * A_SITE):
            words = [folder, lab.address(0), rank, layers, interval_s]
            command = [sys.executable, "-m", "diloco.site_joins", *map(str, words)]
            jobs.append(lab.start_on(rank // A_SITE, command, env=environment))
        for rank, job in enumerate(jobs):
            (ended,) = job.wait(DEADLINE_S)
            if ended.code:
                raise RuntimeError(f"expected exit code 0 of rank {rank}, got {ended.code}: {ended.output[-3000:]}")
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(len(jobs))]


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    folder, store_host, rank, layers, interval_s = sys.argv[1:]
    result = trains(int(rank), Path(folder), store_host, layers=int(layers), interval_s=float(interval_s))
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _main()
