"""lc.DiLoCoX on a pipeline: two clusters of two stages, each of which averages its own parameters with its like."""

import ddp_model
import diloco_model
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pipeline_model import ADAPTIVE, EVERY, Pipeline, stages

import torch_lowcomm as lc

STEPS = 11


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
    rank = Pipeline(r)
    optimizer = rank.wrapped(**options)
    rank.train(optimizer, range(STEPS))
    return _ended([f"{rank.stage}.{name}" for name, _ in rank.module.named_parameters()], rank.module, optimizer)


def _as_a_whole(r, options):
    r.init()
    whole = stages()
    inner = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    optimizer = lc.DiLoCoX(inner, EVERY, **options)
    for step in range(STEPS):
        x, y = ddp_model.batch(r.rank, step)
        (whole[1](whole[0](x)) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _ended([name for name, _ in whole.named_parameters()], whole, optimizer)


@pytest.mark.parametrize(
    "options", [{"mode": "sync"}, {"mode": "continue", "sync_warmup": 1}, {"mode": "restart"}], ids=str
)
def test_two_stages_equal_one_bit_for_bit(quad, pair, options):
    options = {"codec": None, **options}
    whole, parts = pair(_as_a_whole, options), quad(_in_stages, options)
    for cluster in range(2):
        both = {**parts[2 * cluster], **parts[2 * cluster + 1]}
        assert not diloco_model.differing(dict(sorted(both.items())), dict(sorted(whole[cluster].items())))


@pytest.mark.on("quad", group={})
def test_stages_agree_on_the_interval(r):
    """They see different averages: their ranks differ, and the interval is the same at every outer step."""
    rank = Pipeline(r)
    optimizer = rank.wrapped(6, **ADAPTIVE)
    own, notes = [], [None] * r.size  # an entry for each outer step: (inner step, interval, rank, effective rank)
    for step in range(48):
        rank.backward(step)
        begun = optimizer.report["outer_steps"]
        optimizer.step()
        optimizer.zero_grad()
        report = optimizer.report
        if report["outer_steps"] > begun:
            own.append((step, report["sync_every"], report["rank"], report["effective_rank"]))
    optimizer.finish()
    dist.all_gather_object(notes, own)
    for mine in notes:
        assert [note[:2] for note in mine] == [note[:2] for note in notes[0]]
    assert notes[0] == notes[2] and notes[1] == notes[3], "clusters see the same averages"
    assert [note[2:] for note in notes[0]] != [note[2:] for note in notes[1]]
    intervals = [note[1] for note in notes[0]]
    assert intervals[0] == 6 and 2 <= min(intervals) < 6
    for (_, interval, first, _), (*_, second, _) in zip(notes[0], notes[1], strict=True):
        assert interval == max(2, round(6 * (first + second) / 2 / 6))


@pytest.mark.on("quad")
def test_stages_are_resumed(r):
    """Stages saved into one distributed checkpoint while averages are under way; their tensors have the same names."""

    def fresh():
        r.init()
        rank = Pipeline(r)
        return rank, rank.wrapped(**ADAPTIVE)

    rank, optimizer = fresh()
    rank.train(optimizer, range(STEPS))
    own = f"stage{r.rank}"
    dcp.save({"loop": optimizer, own: rank.module.state_dict()}, checkpoint_id=r.path("dcp"))
    rank.train(optimizer, range(STEPS, 3 * STEPS))
    whole = diloco_model.ended(rank.module, optimizer)
    dist.destroy_process_group()

    rank, optimizer = fresh()
    module = {own: rank.module.state_dict()}
    dcp.load({"loop": optimizer, **module}, checkpoint_id=r.path("dcp"))
    rank.train(optimizer, range(STEPS, 3 * STEPS))
    assert not diloco_model.differing(diloco_model.ended(rank.module, optimizer), whole)
