"""A site that joins late takes all of the outer state: fragments, averaged buffers, by the clock, from sites that are lost."""

import signal

import diloco_model
import pytest
import ranks
import torch.distributed as dist
from site_rank import DEADLINE_S, SiteRank, at, die, expect_equal, site_of

LIMIT = 10_000  # inner steps of an interval: the clock ends all of them


def _joins(r, port, how, options):
    """A site trains; another and slower one with another model joins it. Both end by the count of outer steps."""
    site = site_of(r.rank)
    begins = site[0] == "a"
    if not begins:
        r.hear("begun", timeout_s=60)
    trained = SiteRank(
        r,
        port,
        site,
        how,
        seed=0 if begins else 5,
        norm=True,
        bound=1.05,  # an outer step moves running means further
        average_buffers=True,
        lost_after_s=10.0,
        **options,
    )
    if begins:
        first = trained.outer_validation()
        trained.until_outer_step(8)
        if r.rank == 0:
            r.say("begun")
    trained.steps_until(2)
    joined = trained.outer_state()
    begun, steps = trained.opt.report["outer_steps"], trained.opt.steps
    assert begun >= 8
    trained.until_outer_step(begun + 9, pause_s=0.25 if "sync_seconds" in options and not begins else 0.0)
    assert trained.lost == [] and trained.opt.report["participating"] == 2
    if begins:
        assert trained.outer_validation() < 0.9 * first, "it has gone on training"
    return joined, trained.opt.steps - steps, trained.ended()


@pytest.mark.later
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("ddp", {"fragments": 2, "mode": "restart"}),
        ("fsdp2", {"fragments": 2, "mode": "continue", "sync_every": LIMIT, "sync_seconds": 0.6}),
    ],
    ids=["restart", "continue by the clock"],
)
def test_a_site_that_joins_takes_all_of_the_outer_state(store, how, options):
    found = ranks.run_ranks(_joins, 4, store.port, how, options, timeout=DEADLINE_S)
    means = 0
    for (joined, *_), (theirs, *_) in zip(found[:2], found[2:], strict=True):
        assert not diloco_model.differing(joined, theirs)
        means += sum(bool(t.any()) for name, t in joined.items() if name.endswith("running_mean.outer"))
    assert means == 1, "one rank of a site keeps them, and training has moved them"
    steps = [count for _, count, _ in found]
    assert steps[0] == steps[1] and steps[2] == steps[3]
    assert (steps[0] > steps[2]) == ("sync_seconds" in options), steps
    expect_equal([ended for *_, ended in found])


def _giver_is_killed(r, port):
    """A site that gives its state to a newcomer is killed meanwhile: the newcomer has the state, or takes it from the other."""
    site = site_of(r.rank)
    if site[0] == "c":
        r.hear("begun", timeout_s=60)
    large = {"hidden": 3_000, "bound": float("inf")}  # for which the steps are too long
    trained = SiteRank(
        r, port, site, "fsdp2", seed=int(site[0] == "c"), mode="sync", min_machines=2, timeout_s=30.0, **large
    )
    if site[0] != "c":
        trained.steps_until(2)
        trained.until_outer_step(4)
        if r.rank == 0:
            r.say("begun")
    if r.rank == 3:
        at("DiLoCoX: take over the outer state", die, once=True)
    if site[0] == "b":
        with pytest.raises(dist.DistBackendError):
            trained.steps_until(4)
        die()  # its launcher ends it
    while len(trained.members.formed.machines) != 2 or "b" in trained.members.formed.machines:
        trained.steps(1)
    joined = trained.outer_state()
    trained.until_outer_step(trained.opt.report["outer_steps"] + 4)
    return joined, trained.ended()


@pytest.mark.slow
def test_a_site_joins_though_one_that_gives_is_killed(store):
    gone = {2: -signal.SIGKILL, 3: -signal.SIGKILL}
    found = ranks.run_ranks(_giver_is_killed, 6, store.port, timeout=DEADLINE_S, allow_exit=gone)
    for place in range(2):
        first, third = found[place], found[4 + place]
        assert not diloco_model.differing(first[0], third[0])
        expect_equal([first[1], third[1]])
