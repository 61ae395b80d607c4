"""lc.DiLoCoX on a pipeline where one stage fails: all stages are told, at once, and what went wrong."""

import os
import pickle
import signal

import diloco_model
import pytest
import ranks
import torch.distributed as dist
from pipeline_model import ADAPTIVE, EVERY, Pipeline

NEVER_S = 600.0  # longer than the harness waits: who has failed is told at once


def _one_stage_fails(r):
    """The last stage of cluster 0 has a NaN when the pseudo-gradient is taken; the others' are sound."""
    r.init(timeout_s=20)
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
    return str(caught.value), [p.detach().clone() for p in rank.module.parameters()]


def test_an_error_of_one_stage_is_every_stages(quad):
    ranks = quad(_one_stage_fails)
    for rank, (said, parameters) in enumerate(ranks):
        expected = "an error of another one's" if rank % 2 == 0 else f"on {'this' if rank == 1 else 'another'} rank"
        assert expected in said, said
        assert all(p.isfinite().all() for p in parameters)
        assert not diloco_model.differing(parameters, ranks[rank % 2][1])


def _dies(r):
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
    return str(caught.value)


def test_a_death_in_one_stage_is_named_in_the_others():
    first, averaged, cluster, _ = ranks.run_ranks(_dies, 4, allow_exit={3: -signal.SIGKILL})
    assert "outer_step" in averaged and "rank 1 (global 3)" in averaged
    # The other stage of cluster 0: what its neighbour met, word for word.
    assert "an error of another one's" in first and "rank 1: lowcomm: outer_step failed" in first, first
    assert "rank 1 (global 3)" in first
    assert "DiLoCoX outer step" in cluster and "rank 1 (global 3)" in cluster, cluster


def _saves(r, fails):
    """`fails`: the first time, one stage's inner state cannot be written, for a reason of its own."""
    r.init(timeout_s=NEVER_S)
    rank = Pipeline(r)
    optimizer = rank.wrapped(codec="sym4:bucket=64", rank=6)
    rank.train(optimizer, range(2 * EVERY + 1))  # an average is under way
    said = ""
    if fails:
        if r.rank == 1:
            optimizer.param_groups[0]["warm_up"] = lambda step: step  # no pickle of it
        with pytest.raises((pickle.PicklingError, AttributeError) if r.rank == 1 else dist.DistBackendError) as caught:
            optimizer.state_dict()
        optimizer.param_groups[0].pop("warm_up", None)
        said = str(caught.value)
    else:
        optimizer.state_dict()
    rank.train(optimizer, range(2 * EVERY + 1, 5 * EVERY))
    return said, diloco_model.ended(rank.module, optimizer)


def test_a_state_that_one_stage_cannot_write_is_nobodys(quad):
    failed, sound = quad(_saves, True), quad(_saves, False)
    for rank, (said, _) in enumerate(failed):
        assert rank == 1 or ("DiLoCoX state refused: rank " in said and "pickle" in said.lower()), said
    assert not diloco_model.differing([ended for _, ended in failed], [ended for _, ended in sound])
