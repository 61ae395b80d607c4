"""Sites of two ranks of which one after another comes, and is lost in an op: killed, stopped, or cut off from the others."""

import contextlib
import os
import signal
from functools import partial

import pytest
import ranks
import torch.distributed as dist
from ranks import Rank
from site_rank import DEADLINE_S, SiteRank, at, die, expect_equal, leave_host, on_host, site_of

# The ops of an outer step, in their order, which come again and again; and those by which a site joins, which come once.
OUTER_STEP = (
    "DiLoCoX: collect a site's parameters",
    "outer_step",
    "DiLoCoX outer step",
    "DiLoCoX: spread a site's parameters",
    "DiLoCoX check",
)
STAGES = OUTER_STEP[1:3] + OUTER_STEP[4:]  # of stages, which share nothing with one another
CLOCK = "DiLoCoX: compare clocks in a site"  # with sync_seconds, between outer steps
JOINING = (
    "DiLoCoX: compare outer steps",
    "DiLoCoX: take over the outer state",
    "DiLoCoX: compare the schedule in a site",
)
AT_THE_END = 16  # outer steps whose losses are averaged


def _is_lost(r, port, site, how, what, options):
    """A site that joins; its rank `what["place"]` is lost in `what["op"]`, and the other is told, whose launcher ends it.

    A rank that is to be cut off stops itself; the test cuts its host off and wakes the rank up.
    """
    mine, name = site[2] == what["place"], site[0]

    def fault():
        r.say(f"{name}-faulty", os.getpid())
        os.kill(os.getpid(), what["signal"])

    if mine and what["op"] in JOINING:
        at(what["op"], fault, once=True)
    with pytest.raises((dist.DistBackendError, ConnectionError)):
        trained = SiteRank(r, port, site, how, seed=5, **options)
        trained.steps_until(what["sites"])
        if mine and what["op"] not in JOINING:
            at(what["op"], fault)
        while True:
            trained.steps(1)
    if not what["cut"]:
        with contextlib.suppress(ProcessLookupError):  # it was killed
            os.kill(int(r.hear(f"{name}-faulty")), signal.SIGKILL)
    if not mine:
        r.say(f"{name}-gone", os.getpid())
    die()


def lose_sites(r, port, how, stay, number, ops, options, *, cut=False, outer_steps=80):
    """`stay` sites stay; to them comes one after another, of which a rank is lost in an op, until all ops have been met.

    They end after so many outer steps, or as soon after them as they can.

    Returns how often the op cost a site its interval, the outer steps and the mean loss after the last of them, and what has
    ended.
    """
    turn = r.rank // 2 - stay
    if turn >= 0:
        op = ops[turn]
        r.hear(f"turn{turn}", timeout_s=3 * DEADLINE_S)
        what = {"op": op, "signal": number, "place": turn % 2, "sites": stay + 1, "cut": cut}
        return _is_lost(r, port, (f"gone{turn}", 2, r.rank % 2), how, what, options)
    trained = SiteRank(r, port, site_of(r.rank), how, **options)
    lost, first = [], trained.outer_validation()
    trained.steps_until(stay)
    for turn, op in enumerate(ops):
        r.say(f"turn{turn}")
        before, formed = len(trained.lost), trained.members.formed.number
        while not _has_gone(r, trained, turn, stay, formed):
            trained.steps(1, pause_s=0.05)
        lost.append((op, len(trained.lost) - before, trained.members.formed.number - formed))
    if r.rank == 0:
        begun = trained.opt.report["outer_steps"]
        r.say("last", max(begun + 3 + AT_THE_END, outer_steps))  # of a step, all sites have begun at most one more
    last, losses = int(r.hear("last")), []
    for step in range(last - AT_THE_END, last):
        trained.until_outer_step(step + 1)
        losses.append(trained.outer_validation())
    assert trained.opt.report["participating"] == stay
    assert not options.get("adapt_rank") or trained.opt.report["rank"] < options["rank"]
    assert losses[-1] < 0.9 * first, "it has trained through all of them"
    return lost, (last, sum(losses) / AT_THE_END), trained.ended()


def lose_sites_on_hosts(r, port, how, stay, *arguments, folder, namespaces, **options):
    """The same in a lab: each site that stays has a host, and those that are lost have the last one."""
    here = on_host(r, port, folder, namespaces)
    found = lose_sites(here, port, how, stay, *arguments, cut=True, **options)
    leave_host(here, range(2 * stay))
    return found


def come_back(r, port, folder, namespaces, options):
    """Two sites; the second is cut off and ends, and new processes have its id once the link is mended."""
    again, staying = r.rank >= 4, r.rank < 2
    here = on_host(r, port, folder, namespaces)
    site = ("ab"[r.rank >= 2], 2, r.rank % 2)
    if again:
        here.hear("mended", timeout_s=DEADLINE_S)
        here.path("again").mkdir(exist_ok=True)
    rendezvous = Rank(r.rank, r.size, str(here.path("again"))) if again else here
    trained = SiteRank(rendezvous, port, site, "fsdp2", seed=int(again), **options)
    trained.steps_until(2)
    if not again:
        trained.steps_together(6)
        here.say(f"trained{r.rank}", os.getpid())
    if not again and not staying:
        with pytest.raises((dist.DistBackendError, ConnectionError)):
            while True:
                trained.steps(1)
        die()  # its launcher ends it
    if staying:
        trained.steps_until(1)
        assert len(trained.lost) == 1
        trained.steps(6)
        here.say("alone")
        trained.steps_until(2)
    trained.steps_together(9)
    ended = trained.ended()
    leave_host(here, range(2), range(4, 6))
    return ended


def _has_gone(r, trained, turn, stay, formed):
    """Whether the site of this turn has come and is gone, as the first rank of this one knows it."""
    known = [r.path(f"gone{turn}-gone").exists() and trained.members.formed.number > formed]
    dist.broadcast_object_list(known, 0)
    return known[0] and len(trained.members.formed.machines) == stay


def expect_survivors(found, how):
    """Of the ranks of the sites that stay: a loss costs an interval, and all sites have the same bits at the end.

    A site that is lost while it joins is noticed where the others form the group, or by their next outer step: they may lose
    no interval, but they leave the group that the site had come to.

    Returns:
        (outer steps, the mean loss after the last of them).
    """
    for lost, *_ in found:
        for op, times, groups in lost:
            assert times == 1 if op not in JOINING else times <= 1, (op, times)
            assert groups >= 2, (op, groups)
    parts = 2 if how == "pipeline" else 1
    for place in range(parts):
        expect_equal([ended for *_, ended in found[place::parts]])
    (loss,) = {loss for _, loss, _ in found}
    return loss


def expect_phases(port, how, stay, number, ops, outer_steps=80, sites=lose_sites, **options):
    """The same, of sites on this host whose ranks get a signal, or of `sites` elsewhere."""
    size = 2 * (stay + len(ops))
    gone = dict.fromkeys(range(2 * stay, size), -signal.SIGKILL)
    sites = partial(sites, outer_steps=outer_steps)
    found = ranks.run_ranks(sites, size, port, how, stay, number, ops, options, timeout=3 * DEADLINE_S, allow_exit=gone)
    return expect_survivors(found[: 2 * stay], how)


def expect_faultless(end, port, how, stay, **options):
    """The loss is that of the same sites after as many outer steps without any fault, within 1 %."""
    steps, loss = end
    _, faultless = expect_phases(port, how, stay, signal.SIGKILL, (), outer_steps=steps, **options)
    assert 0.99 < loss / faultless < 1.01, (steps, loss, faultless)
