"""lc.DiLoCoX on a pipeline where one stage fails: all stages are told, at once, and what went wrong."""

import os
import pickle
import signal

import diloco_model
import pytest
import torch.distributed as dist
from pipeline_model import ADAPTIVE, EVERY, Pipeline

NEVER_S = 600.0  # longer than the harness waits: who has failed is told at once


@pytest.mark.on("quad", group={"timeout_s": 20})
def test_an_error_of_one_stage_is_every_stages(r):
    """The last stage of cluster 0 has a NaN when the pseudo-gradient is taken; the others' are sound."""
    rank = Pipeline(r)
    optimizer = rank.wrapped(mode="sync", **ADAPTIVE)
    inner = optimizer.inner

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
    said = str(caught.value)
    assert ("an error of another one's", "on this rank", "an error of another one's", "on another rank")[r.rank] in said
    clusters = [None] * 4
    dist.all_gather_object(clusters, [p.detach().clone() for p in rank.module.parameters()])
    assert all(p.isfinite().all() for p in clusters[r.rank])
    assert not diloco_model.differing(clusters[r.rank], clusters[r.rank % 2])


@pytest.mark.on(4, allow_exit={3: -signal.SIGKILL})
def test_a_death_in_one_stage_is_named_in_the_others(r):
    """The last stage of cluster 1 is killed before its part of an outer step."""
    r.init(timeout_s=NEVER_S)
    rank = Pipeline(r)
    optimizer = rank.wrapped(mode="sync", **ADAPTIVE)
    rank.train(optimizer, range(3 * EVERY - 1))
    rank.backward(3 * EVERY - 1)
    before = [outer.clone() for _, outer in optimizer._outer.carried()]
    dist.barrier()
    if r.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError) as caught:
        optimizer.step()
    assert not diloco_model.differing([outer for _, outer in optimizer._outer.carried()], before)
    r.say(f"told{r.rank}")
    for other in range(3):  # its connections stay until all have heard
        r.hear(f"told{other}")
    said = str(caught.value)
    parts = (  # the other stage of cluster 0 hears what its neighbour met, word for word
        ("an error of another one's", "rank 1: lowcomm: outer_step failed"),
        ("outer_step",),
        ("DiLoCoX outer step",),
    )
    assert all(part in said for part in (*parts[r.rank], "rank 1 (global 3)")), said


@pytest.mark.on("quad")
def test_a_state_that_one_stage_cannot_write_is_nobodys(r):
    """One stage's inner state cannot be written, for a reason of its own; all train as if none had been asked for one."""
    ended = []
    for fails in (True, False):
        r.init(timeout_s=NEVER_S)
        rank = Pipeline(r)
        optimizer = rank.wrapped(codec="sym4:bucket=64", rank=6)
        rank.train(optimizer, range(2 * EVERY + 1))  # an average is under way
        if fails:
            if r.rank == 1:
                optimizer.param_groups[0]["warm_up"] = lambda step: step  # no pickle of it
            error = (pickle.PicklingError, AttributeError) if r.rank == 1 else dist.DistBackendError
            with pytest.raises(error, match=".*" if r.rank == 1 else "(?is)DiLoCoX state refused: rank .*pickle"):
                optimizer.state_dict()
            optimizer.param_groups[0].pop("warm_up", None)
        else:
            optimizer.state_dict()
        rank.train(optimizer, range(2 * EVERY + 1, 5 * EVERY))
        ended.append(diloco_model.ended(rank.module, optimizer))
        dist.destroy_process_group()
    assert not diloco_model.differing(*ended)
