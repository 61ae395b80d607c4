"""Measures bytes and state of sites of several ranks in an outer step, and those that a site takes over when it joins.

    python benchmarks diloco_sites [--quick] [--json FILE]

Two sites on loopback, of 1, 2 and 4 replicas each: the bytes that a site sends for an outer step, and the elements of outer
state that its ranks keep. Then a site of two ranks, which train a model of 135 million parameters, is joined by another one:
the bytes that the newcomer takes over, and the seconds that the others' training stood still for it. The bytes are exact. The
seconds are those of loopback and of this machine's memory; on a slow link they are the bytes over its rate.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import launch
from report import Gate, finish, heading

WIDTH, LAYERS, QUICK_LAYERS, EVERY = 1000, 135, 3, 4
CODEC = "sym4:bucket=128"
DEADLINE_S = 600.0


def replicas(rank: int, init_method: str, *, a_site: int, layers: int) -> dict[str, Any]:
    """One rank of two sites of `a_site` replicas: its report, and the elements of outer parameters that it keeps."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import torch_lowcomm as lc

    dist.init_process_group("lowcomm", init_method=init_method, rank=rank, world_size=2 * a_site)
    mesh = init_device_mesh("cpu", (2, a_site), mesh_dim_names=("sites", "replicas"))
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    opt = lc.DiLoCoX(inner, EVERY, model=model, mesh=mesh, codec=CODEC, mode="sync")
    for parameter in model.parameters():
        parameter.grad = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(rank // a_site))
    for _ in range(2 * EVERY):
        opt.step()
    report = opt.report
    opt.finish()
    dist.destroy_process_group()
    kept = sum(report["stripe_elements"][stripe] for stripe in report["stripes"])
    return {"site": rank // a_site, "sent_bytes": report["sent_bytes"], "kept": kept}


def joins(rank: int, init_method: str, *, layers: int) -> dict[str, Any]:
    """One rank of two sites of two; the second comes when the first has trained for an interval."""
    import torch
    import torch.distributed as dist

    import torch_lowcomm as lc

    folder = Path(init_method.removeprefix("file://")).parent
    site, place = divmod(rank, 2)
    meeting = folder / "meeting"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port").write_text(str(store.port))
        (folder / "port").rename(meeting)
    while not meeting.exists() or (site == 1 and not (folder / "begun").exists()):
        time.sleep(0.05)
    client = dist.TCPStore("127.0.0.1", int(meeting.read_text()), is_master=False)
    patient = timedelta(seconds=DEADLINE_S / 2)
    dist.init_process_group("lowcomm", init_method=f"{init_method}-{site}", rank=place, world_size=2, timeout=patient)
    torch.manual_seed(site)
    model = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    members = lc.Membership(client, "ab"[site], site=dist.group.WORLD, timeout=patient)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    opt = lc.DiLoCoX(
        inner, EVERY, model=model, group=members, replicas=dist.group.WORLD, codec=CODEC, mode="sync", check_every=0
    )
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    stood_still, steps = 0.0, 0
    while site == 0 and len(members.formed.machines) < 2:
        opt.step()
        steps += 1
        if opt.regroup_due:
            start = time.monotonic()
            opt.regroup()
            stood_still = time.monotonic() - start
        if steps == EVERY and rank == 0:
            (folder / "begun").touch()
        time.sleep(0.01)
    report = opt.report
    for _ in range(EVERY):
        opt.step()
    opt.finish()
    members.leave()
    dist.barrier()
    dist.destroy_process_group()
    return {
        "taken_bytes": report["taken_bytes"],
        "taken_s": report["taken_s"],
        "stood_still_s": stood_still,
        "steps_meanwhile": steps,
    }


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model: that the program works")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    layers = QUICK_LAYERS if args.quick else 13
    large = QUICK_LAYERS if args.quick else LAYERS
    print(heading("diloco_sites", elements=layers * WIDTH**2, joined_elements=large * WIDTH**2, codec=CODEC))
    print(f"# {'replicas a site':<18}{'site sends, bytes':>18}{'x of one rank':>15}{'a rank keeps, at most':>23}")
    rows, gates = [], []
    for a_site in (1, 2, 4):
        ranks = launch.run(replicas, ranks=2 * a_site, deadline_s=DEADLINE_S, a_site=a_site, layers=layers)
        sent = sum(one["sent_bytes"] for one in ranks if one["site"] == 0)
        row = {"replicas": a_site, "sent_bytes": sent, "kept": max(one["kept"] for one in ranks) / (layers * WIDTH**2)}
        rows.append(row)
        ratio = sent / rows[0]["sent_bytes"]
        print(f"  {a_site:<18}{sent:>18}{ratio:>15.4f}{row['kept']:>23.3f}")
        gates.append(Gate(f"{a_site} replicas a site, bytes of a site / of one rank", ratio, "<=", 1.01))
        gates.append(Gate(f"{a_site} replicas a site, state of a rank x replicas", row["kept"] * a_site, "<=", 1.1))
    found = launch.run(joins, ranks=4, deadline_s=DEADLINE_S, layers=large)
    taken = sum(one["taken_bytes"] for one in found[2:])
    row = {"taken_bytes": taken, "seconds": max(one["taken_s"] for one in found[2:])}
    row |= {"stood_still_s": max(one["stood_still_s"] for one in found[:2]), "steps": found[0]["steps_meanwhile"]}
    print(
        f"# a site joins: takes {taken} bytes in {row['seconds']:.2f} s; the others stood still for "
        f"{row['stood_still_s']:.2f} s and made {row['steps']} steps before"
    )
    gates.append(Gate("a site joins, bytes / 8 a parameter", taken / (8 * large * WIDTH**2), "<=", 1.0))
    return finish(gates, args.json, {"rows": rows, "joins": row})


if __name__ == "__main__":
    raise SystemExit(main())
