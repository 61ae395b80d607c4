"""lc.DiLoCoX on a pipeline: two clusters of two stages, each of which averages its own parameters with its like."""

import ddp_model
import diloco_model
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_lowcomm as lc

EVERY, STEPS, HIDDEN = 3, 11, 64


def _stages():
    torch.manual_seed(7)
    first = nn.Sequential(nn.Linear(ddp_model.WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU())
    return nn.ModuleList([first, nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 7))])


class _Pipeline:
    """One rank of it: the stage's module, and a training step's work on it."""

    def __init__(self, r):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("clusters", "stages"))
        self.cluster, self.stage = divmod(r.rank, 2)
        self.other = 2 * self.cluster + 1 - self.stage
        self.between = self.mesh.get_group("stages")
        self.module = _stages()[self.stage]

    def backward(self, step):
        x, y = ddp_model.batch(self.cluster, step)
        activations = torch.empty(len(x), HIDDEN)
        if self.stage == 0:
            activations = self.module(x)
            dist.send(activations.detach(), self.other, self.between)
            gradient = torch.empty_like(activations)
            dist.recv(gradient, self.other, self.between)
            activations.backward(gradient)
            return
        dist.recv(activations, self.other, self.between)
        activations.requires_grad_()
        (self.module(activations) - y).square().mean().backward()
        dist.send(activations.grad, self.other, self.between)


def _ended(names, module, optimizer):
    """Own, outer and finished parameters and the inner optimizer's moments, by the names that the whole model has."""
    found = {}

    def note(what, tensors):
        found.update({f"{what} {name}": tensor.detach().clone() for name, tensor in zip(names, tensors, strict=True)})

    note("own", module.parameters())
    with optimizer.outer_parameters():
        note("outer", module.parameters())
    note("moment", [optimizer.state[p]["exp_avg"] for p in module.parameters()])
    optimizer.finish()
    note("finished", module.parameters())
    return found


def _in_stages(r, options):
    r.init()
    rank = _Pipeline(r)
    inner = torch.optim.AdamW(rank.module.parameters(), lr=1e-2)
    optimizer = lc.DiLoCoX(inner, EVERY, mesh=rank.mesh, **options)
    for step in range(STEPS):
        rank.backward(step)
        optimizer.step()
        optimizer.zero_grad()
    return _ended([f"{rank.stage}.{name}" for name, _ in rank.module.named_parameters()], rank.module, optimizer)


def _as_a_whole(r, options):
    r.init()
    stages = _stages()
    inner = torch.optim.AdamW(stages.parameters(), lr=1e-2)
    optimizer = lc.DiLoCoX(inner, EVERY, **options)
    for step in range(STEPS):
        x, y = ddp_model.batch(r.rank, step)
        (stages[1](stages[0](x)) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _ended([name for name, _ in stages.named_parameters()], stages, optimizer)


@pytest.mark.parametrize(
    "options", [{"mode": "sync"}, {"mode": "continue", "sync_warmup": 1}, {"mode": "eager"}], ids=str
)
def test_two_stages_equal_one_bit_for_bit(quad, pair, options):
    options = {"codec": None, **options}
    whole, parts = pair(_as_a_whole, options), quad(_in_stages, options)
    for cluster in range(2):
        both = {**parts[2 * cluster], **parts[2 * cluster + 1]}
        assert not diloco_model.differing(dict(sorted(both.items())), dict(sorted(whole[cluster].items())))


ADAPTIVE = {
    "codec": "sym8:bucket=64",
    "rank": 6,
    "adapt_rank": True,
    "adapt_sync_every": True,
    "window": 2,
    "energy": 0.7,
    "min_sync_every": 2,
}


def _adapts(r):
    """What each outer step was: (inner step, interval, rank, effective rank)."""
    r.init()
    rank = _Pipeline(r)
    optimizer = lc.DiLoCoX(torch.optim.AdamW(rank.module.parameters(), lr=1e-2), 6, mesh=rank.mesh, **ADAPTIVE)
    notes = []
    for step in range(48):
        rank.backward(step)
        begun = optimizer.report["outer_steps"]
        optimizer.step()
        optimizer.zero_grad()
        report = optimizer.report
        if report["outer_steps"] > begun:
            notes.append((step, report["sync_every"], report["rank"], report["effective_rank"]))
    optimizer.finish()
    return notes


def test_stages_agree_on_the_interval(quad):
    """They see different averages: their ranks differ, and the interval is the same at every outer step."""
    notes = quad(_adapts)
    for mine in notes:
        assert [note[:2] for note in mine] == [note[:2] for note in notes[0]]
    assert notes[0] == notes[2] and notes[1] == notes[3], "clusters see the same averages"
    assert [note[2:] for note in notes[0]] != [note[2:] for note in notes[1]]
    intervals = [note[1] for note in notes[0]]
    assert intervals[0] == 6 and 2 <= min(intervals) < 6
    for (_, interval, first, _), (*_, second, _) in zip(notes[0], notes[1], strict=True):
        assert interval == max(2, round(6 * (first + second) / 2 / 6))


def _resumes(r):
    """Stages saved into one distributed checkpoint while averages are under way; their tensors have the same names."""

    def fresh():
        r.init()
        rank = _Pipeline(r)
        inner = torch.optim.AdamW(rank.module.parameters(), lr=1e-2)
        return rank, lc.DiLoCoX(inner, EVERY, mesh=rank.mesh, **ADAPTIVE)

    def train(steps):
        for step in steps:
            rank.backward(step)
            optimizer.step()
            optimizer.zero_grad()

    rank, optimizer = fresh()
    train(range(STEPS))
    own = f"stage{r.rank}"
    dcp.save({"loop": optimizer, own: rank.module.state_dict()}, checkpoint_id=r.path("dcp"))
    train(range(STEPS, 3 * STEPS))
    whole = diloco_model.ended(rank.module, optimizer)
    dist.destroy_process_group()

    rank, optimizer = fresh()
    module = {own: rank.module.state_dict()}
    dcp.load({"loop": optimizer, **module}, checkpoint_id=r.path("dcp"))
    train(range(STEPS, 3 * STEPS))
    assert not diloco_model.differing(diloco_model.ended(rank.module, optimizer), whole)


def test_stages_are_resumed(quad):
    quad(_resumes)


def _always(rank):
    return EVERY


def _one_stage_fails(r):
    """The last stage of cluster 0 has a NaN when the pseudo-gradient is taken; the others' are sound."""
    r.init(timeout_s=20)
    rank = _Pipeline(r)
    inner = torch.optim.AdamW(rank.module.parameters(), lr=1e-2)
    optimizer = lc.DiLoCoX(inner, EVERY, mesh=rank.mesh, mode="sync", **ADAPTIVE, sync_rule=_always)

    def train(steps, spoilt=False):
        for step in range(steps):
            rank.backward(step)
            if spoilt and r.rank == 1:
                inner.param_groups[0]["params"][0].grad[2, 3] = float("nan")
            optimizer.step()
            optimizer.zero_grad()

    train(3 * EVERY - 1)
    before = diloco_model.ended(rank.module, optimizer)
    with pytest.raises(ValueError) as caught:
        train(1, spoilt=True)
    after = diloco_model.ended(rank.module, optimizer)
    assert not diloco_model.differing(before["outer"], after["outer"])
    optimizer.restore()
    optimizer.zero_grad()
    inner.state.clear()  # moments of a NaN
    train(2 * EVERY)
    assert optimizer.report["outer_steps"] == 4
    optimizer.finish()
    return str(caught.value), [p.detach().clone() for p in rank.module.parameters()]


def test_an_error_of_one_stage_is_every_stages(quad):
    ranks = quad(_one_stage_fails)
    for rank, (said, parameters) in enumerate(ranks):
        expected = "an error of another one's" if rank % 2 == 0 else f"on {'this' if rank == 1 else 'another'} rank"
        assert expected in said, said
        assert all(p.isfinite().all() for p in parameters)
        assert not diloco_model.differing(parameters, ranks[rank % 2][1])
