"""The ways to train that a plan compares: each with its seconds, bytes, memory, loss, and the lines to paste."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch_lowcomm.diloco import presets
from torch_lowcomm.planner import loss
from torch_lowcomm.planner.link import Link
from torch_lowcomm.planner.measure import G4, G8, GAUSS2, GAUSS4, INT4, INT8, W4, W6, W8
from torch_lowcomm.planner.training import Training, ddp_s, fsdp_s, outer_s, pipeline_s

STAGES = 64  # at most: each is simulated
INTERVALS = (20, 100, 500)
_FRAMES = 0.02  # bits an element of a pipeline's message that headers take
_UNUSED = ", find_unused_parameters=True"


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: Its name in the table.
        method: "ddp", "fsdp", "diloco", "pipeline", "subspace" or "seed_replay".
        step_s: Seconds of a step, in which all ranks together take their batches once.
        sent: Bytes that a site sends in it.
        memory: Bytes of a rank without activations.
        loss: The factor on the loss of exact training.
        lines: What to paste.
        options: Arguments of the call in `lines`; `Plan.apply` makes the same one.
        fine_tuning: Whether it is for a trained model whose samples come back.
    """

    name: str
    method: str
    step_s: float
    sent: float
    memory: float
    loss: loss.Factor
    lines: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fine_tuning: bool = False


def all_ways(of: Training, link: Link) -> list[Way]:
    """Every way that suits the training and the link; the first is exact DDP, which others are compared with."""
    ways = [*_ddp(of, link), *_fsdp(of, link)]
    if link.sites > 1:
        ways += _outer(of, link)
    if link.ranks_per_site == 1 < link.ranks <= min(of.layers, STAGES) and of.tokens and of.width:
        ways += _pipelines(of, link)
    return [*ways, _seed_replay(of, link)]


def _ddp(of: Training, link: Link) -> Iterator[Way]:
    memory = _optimizer(of)
    wrap = f"model = DistributedDataParallel(model{_UNUSED * of.unused})"
    step_s, sent = ddp_s(of, link)
    yield Way("exact DDP", "ddp", step_s, sent, memory, loss.EXACT, wrap)
    for name, codec, rank, curve in (
        ("DDP, 4 bits", INT4, None, "sym4"),
        ("DDP, gauss4", GAUSS4, None, "gauss4"),
        ("DDP, rank 4", INT8, 4, "rank 4, sym8"),
    ):
        if rank and not of.matrices:
            continue
        options = {"codec": codec} | ({"rank": rank} if rank else {})
        step_s, sent = ddp_s(of, link, codec, factors=of.factor_elements(rank) if rank else None)
        lines = f"{wrap}\nmodel.register_comm_hook(lc.ddp.State({_arguments(options)}, model=model), lc.ddp.hook)"
        residual = 8 * of.parameters / link.ranks_per_site
        yield Way(name, "ddp", step_s, sent, memory + residual, loss.measured("ddp", curve), lines, options)


def _fsdp(of: Training, link: Link) -> Iterator[Way]:
    memory = _optimizer(of) / link.ranks + of.bits / 4 * of.parameters / of.layers  # and two blocks that are gathered
    each = f"for block in {of.blocks}:\n    fully_shard(block)\n" if of.blocks else ""
    shard = f"{each}fully_shard(model)"
    step_s, sent = fsdp_s(of, link, None, None)
    yield Way("exact FSDP2", "fsdp", step_s, sent, memory, loss.EXACT, shard)
    for name, weights, gradients in (("W8G8", W8, G8), ("W6G4", W6, G4), ("W4G4", W4, G4)):
        options = {"weights": weights, "gradients": gradients}
        step_s, sent = fsdp_s(of, link, weights, gradients)
        lines = f"{shard}\nlc.fsdp.quantize(model, {_arguments(options)})  # then make the optimizer"
        yield Way(f"FSDP2, {name}", "fsdp", step_s, sent, memory, loss.measured("fsdp_bits", name), lines, options)


def _outer(of: Training, link: Link) -> Iterator[Way]:
    streaming = presets.streaming(fragments=2) | {"codec": GAUSS2}
    site = mesh = ""
    if link.ranks_per_site > 1:
        shape = f'({link.sites}, {link.ranks_per_site}), mesh_dim_names=("sites", "replicas")'
        site, mesh = f'mesh = init_device_mesh("cpu", {shape})\n', ", mesh=mesh"
        site += (
            'model = DistributedDataParallel(model, process_group=mesh.get_group("replicas")'
            + f"{_UNUSED * of.unused})\n"
        )
    for every in INTERVALS:
        price = loss.product(loss.sites(of.parameters, link.sites), loss.interval(of.parameters, link.sites, every))
        for name, options, curve, extra in (
            ("DiLoCo", presets.diloco(), None, 12.0),
            ("DiLoCo, 2 bits", presets.mu_loco(), "sync gauss2", 8.3),
            ("Streaming DiLoCo, 2 bits", streaming, "streaming gauss2", 12.3),
            ("DiLoCoX, 2 bits", {"mode": "continue", "codec": GAUSS2}, "continue gauss2", 12.3),
        ):
            options = {**options, "sync_every": every}
            codec, mode, fragments = options["codec"], options["mode"], options.get("fragments", 1)
            step_s, sent = outer_s(of, link, codec, every, mode, fragments=fragments)
            row = loss.product(price, loss.measured("diloco_lab", curve) if curve else loss.EXACT)
            lines = f"{site}optimizer = lc.DiLoCoX(optimizer, model=model{mesh}, {_arguments(options)})"
            memory = _optimizer(of) + extra / link.ranks_per_site * of.parameters
            yield Way(f"{name}, every {every}", "diloco", step_s, sent, memory, row, lines, options)


def _pipelines(of: Training, link: Link) -> Iterator[Way]:
    memory = _optimizer(of) / link.ranks
    stage = "stage = lc.pipeline.Stage(module, index, ranks, device"
    schedule = f"schedule = lc.pipeline.Schedule1F1B(stage, {8 * link.ranks}, loss_fn=loss_fn, ahead=1)"
    for name, forward, backward, curve, cache in (
        ("pipeline, exact", None, None, "", ""),
        ("pipeline, 4 bits", "gauss4", "gauss4", "DirectQ gauss4/gauss4", ""),
        ("pipeline, changes in 2 bits", "gauss2", "gauss4", "AQ gauss2/gauss4", ", cache=lc.pipeline.Cache()"),
    ):
        bits = [of.bits if codec is None else float(codec[-1]) + 0.1 for codec in (forward, backward)]
        step_s, sent = pipeline_s(of, link, *(b + _FRAMES for b in bits))
        options = {"forward": forward, "backward": backward} if forward else {}
        lines = f"{stage}{', ' * bool(options)}{_arguments(options)}{cache})\n{schedule}"
        price = loss.measured("aq_sgd", curve) if curve else loss.EXACT
        yield Way(name, "pipeline", step_s, sent, memory, price, lines, options, fine_tuning=bool(cache))
    rank = max(of.width // 8, 1)
    step_s, sent = pipeline_s(of, link, *[32 * rank / of.width + _FRAMES] * 2)
    lines = (
        f"model = lc.subspace.constrain(model, rank={rank})\n"
        "stage = lc.pipeline.Stage(lc.subspace.cut(model, index, ranks), index, ranks, device)\n"
        f"optimizer = lc.SubspaceAdamW(stage.submod, lr=lr)\n{schedule}"
    )
    price = loss.measured("subspace", "constrained, 32")
    yield Way("subspace, d / 8", "subspace", step_s, sent, memory, price, lines, {"rank": rank})


def _seed_replay(of: Training, link: Link) -> Way:
    step_s = 2 * of.forward_s + 1e-9 * of.parameters + 2 * link.round_trip_s
    lines = "optimizer = lc.SeedReplay(model, group=dist.group.WORLD)"
    sent = 64.0 * (link.sites - 1)  # a byte a gradient, and its frame's header
    return Way("seed replay", "seed_replay", step_s, sent, 4.0 * of.parameters, loss.UNKNOWN, lines, fine_tuning=True)


def _optimizer(of: Training) -> float:
    """Bytes of the parameters, their gradients and Adam's two moments."""
    return of.bits / 2 * of.parameters


def _arguments(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in options.items())
