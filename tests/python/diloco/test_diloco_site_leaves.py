"""A site of two ranks leaves, or one of its ranks is stopped and wakes up: the others go on, and a site that can comes back."""

import os
import signal

import pytest
import torch.distributed as dist
from site_rank import DEADLINE_S, SiteRank, at, die, site_of, wake


@pytest.mark.later
@pytest.mark.on(6, alike=True, timeout=DEADLINE_S / 3)
def test_the_others_do_not_wait_for_a_site_that_left(r, port):
    """Both ranks of the third site leave; their last sign of life would count for longer than the test may take."""
    site = site_of(r.rank)
    trained = SiteRank(r, port, site, "fsdp2", mode="continue", timeout_s=2 * DEADLINE_S)
    trained.steps_until(3)
    if site[2] == 0:
        trained.members._beat._lost_after_s = 2 * DEADLINE_S
    trained.steps_together(6)
    if site[0] == "c":
        trained.members.leave()
        r.hear("ended", timeout_s=60)
        return None
    trained.steps_until(2)
    trained.steps_together(8)
    if r.rank == 0:
        r.say("ended")
    assert len(trained.lost) == 1 and "closed the channel" in trained.lost[0], trained.lost
    assert sorted(trained.members.formed.machines) == ["a", "b"]
    return trained.ended()


@pytest.mark.slow
@pytest.mark.on(6, alike=True, timeout=DEADLINE_S)
def test_a_site_comes_back_of_which_one_rank_was_stopped(r, port):
    """One rank of the third site is stopped until the others have gone on without its site, and wakes up in time."""
    site = site_of(r.rank)
    # The others give the stopped rank up after 10 s, and its site 2 s later; the other rank of the site waits for it for 20 s.
    deadlines = {"timeout_s": 10.0, "patience_s": 2.0, "site_timeout_s": 60.0}
    trained = SiteRank(r, port, site, "fsdp2", mode="continue", **deadlines)
    trained.steps_until(3)
    trained.steps_together(6)
    if site[0] == "c":
        if site[2] == 1:
            r.say("pid", os.getpid())
            at("DiLoCoX: spread a site's parameters", lambda: os.kill(os.getpid(), signal.SIGSTOP))
        while not trained.lost:
            trained.steps(1)
    else:
        trained.steps_until(2)
        if r.rank == 0:
            wake(int(r.hear("pid")))
    trained.steps_until(3)
    trained.steps_together(9)
    assert len(trained.lost) == 1, trained.lost
    return trained.ended()


@pytest.mark.slow
@pytest.mark.on(6, alike=True, timeout=DEADLINE_S, allow_exit={2: -signal.SIGKILL, 3: -signal.SIGKILL})
def test_a_stopped_rank_that_its_site_has_given_up_ends_when_it_wakes_up(r, port):
    """A rank of the second site is stopped until the other one has given it up; both end, and their launcher starts others."""
    site, again = site_of(r.rank), r.rank >= 4
    if again:
        r.hear("alone", timeout_s=60)
        site = ("b-again", *site[1:])
    trained = SiteRank(r, port, site, "fsdp2", mode="sync", seed=int(again), timeout_s=6.0)
    trained.steps_until(2)
    if not again:
        trained.steps_together(6)
    if site[0] == "b" and not again:
        with pytest.raises(dist.DistBackendError):
            if site[2] == 0:
                r.say("pid", os.getpid())
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                trained.steps(1)
        r.say(f"told{r.rank}")
        if site[2] == 1:
            wake(int(r.hear("pid")))
            r.hear("told2")
        die()
    if not again:
        trained.steps_until(1)
        if r.rank == 0:
            r.hear("told2", timeout_s=60)
            r.hear("told3", timeout_s=60)
            r.say("alone")
        trained.steps_until(2)
    trained.steps_together(9)
    return trained.ended()
