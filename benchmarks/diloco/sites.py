"""Measures bytes and state of sites of several ranks in an outer step, and those that a site takes over when it joins.

    python benchmarks diloco_sites [--quick] [--rate 100mbit] [--json FILE]

Two sites on loopback, of 1, 2 and 4 replicas each: the bytes that a site sends for an outer step, and the elements of outer
state that its ranks keep. Then two sites of two ranks, which train a model of 135 million parameters, are joined by a third one
over links of `--rate`: the bytes that the newcomer takes over and from whom, the seconds that this lasts, the inner steps that
the others make meanwhile, and the seconds that they wait: in regroup(), and at the next outer step. The bytes are exact.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import launch
from report import Gate, finish, heading

from diloco import site_joins

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


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model: that the program works")
    parser.add_argument(
        "--rate", help="of each site's link in the lab when one joins, such as 100mbit; default: loopback"
    )
    parser.add_argument(
        "--interval", type=float, default=4.0, help="seconds from one outer step to the next as a site joins"
    )
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
    joined = site_joins.found(large, args.interval, args.rate)
    taken, given = joined["taken_bytes"], joined["given_bytes"]
    print(
        f"# a site joins ({joined['rate']}): takes {taken} bytes in {joined['taken_s']:.2f} s, {given} of them from each of the "
        f"others, payload and headers; they make {joined['steps_meanwhile']} of {site_joins.EVERY} inner steps of an interval "
        f"of {args.interval:.0f} s meanwhile, stand still for {joined['stood_still_s']:.2f} s in regroup() and wait "
        f"{joined['waited_s']:.2f} s for the next average; the newcomer leaves {joined['left_out']} inner steps out"
    )
    gates.append(Gate("a site joins, bytes / 8 a parameter", taken / (8 * large * WIDTH**2), "<=", 1.0))
    gates.append(Gate("a site joins, most / least that another one gives", max(given) / min(given), "<=", 1.1))
    if not args.quick:
        still = joined["stood_still_s"] / joined["taken_s"]
        gates.append(Gate("a site joins, the others stand still / the newcomer takes over", still, "<=", 0.25))
    return finish(gates, args.json, {"rows": rows, "joins": joined})


if __name__ == "__main__":
    raise SystemExit(main())
