"""Sites of two ranks of which one after another comes, and is lost in an op: killed, stopped, or cut off from the others."""

import contextlib
import os
import signal
from functools import partial

import pytest
import ranks
import torch.distributed as dist
from site_rank import DEADLINE_S, SiteRank, at, die, expect_equal, leave_host, on_host, site_of

KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
JOINING = (
    "DiLoCoX: compare outer steps",
    "DiLoCoX: take over the outer state",
    "DiLoCoX: compare the schedule in a site",
)  # the ops by which a site joins, which come once; all others come again and again
AT_THE_END = 8  # outer steps whose losses are averaged


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


def lose_sites(r, port, how, stay, faults, options, *, cut=False, outer_steps=40):
    """`stay` sites stay; to them comes one after another, of which a rank is lost in an op by a signal: {op: signal}.

    They end after so many outer steps, or as soon after them as they can.

    Returns how often the op cost a site its interval, the outer steps and the mean loss after the last of them, and what has
    ended.
    """
    turn = r.rank // 2 - stay
    if turn >= 0:
        op, number = list(faults.items())[turn]
        r.hear(f"turn{turn}", timeout_s=3 * DEADLINE_S)
        what = {"op": op, "signal": number, "place": turn % 2, "sites": stay + 1, "cut": cut}
        return _is_lost(r, port, (f"gone{turn}", 2, r.rank % 2), how, what, options)
    trained = SiteRank(r, port, site_of(r.rank), how, **options)
    lost, first = [], trained.outer_validation()
    trained.steps_until(stay)
    for turn, op in enumerate(faults):
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


def _has_gone(r, trained, turn, stay, formed):
    """Whether the site of this turn has come and is gone, as the first rank of this one knows it."""
    known = [r.path(f"gone{turn}-gone").exists() and trained.members.formed.number > formed]
    dist.broadcast_object_list(known, 0)
    return known[0] and len(trained.members.formed.machines) == stay


def expect_survivors(found, how, heals=False):
    """Of the ranks of the sites that stay: a loss costs an interval, and all sites have the same bits at the end.

    With a quorum (`heals`) no step raises.

    A site that is lost while it joins is noticed where the others form the group, or by their next outer step: they may lose
    no interval, but they leave the group that the site had come to.

    Returns:
        (outer steps, the mean loss after the last of them).
    """
    for lost, *_ in found:
        for op, times, groups in lost:
            assert times == (0 if heals else 1) if op not in JOINING else times <= (not heals), (op, times)
            assert groups >= 2, (op, groups)
    parts = 2 if how == "pipeline" else 1
    for place in range(parts):
        expect_equal([ended for *_, ended in found[place::parts]])
    (loss,) = {loss for _, loss, _ in found}
    return loss


def expect_phases(port, how, stay, faults, sites=lose_sites, **options):
    """The same, of sites on this host whose ranks get a signal, or of `sites` elsewhere."""
    size = 2 * (stay + len(faults))
    gone = dict.fromkeys(range(2 * stay, size), -signal.SIGKILL)
    found = ranks.run_ranks(sites, size, port, how, stay, faults, options, timeout=3 * DEADLINE_S, allow_exit=gone)
    return expect_survivors(found[: 2 * stay], how, heals="quorum" in options)


def expect_faultless(end, port, how, stay, **options):
    """The loss is that of the same sites after as many outer steps without any fault, within 1 %."""
    steps, loss = end
    _, faultless = expect_phases(port, how, stay, {}, partial(lose_sites, outer_steps=steps), **options)
    assert 0.99 < loss / faultless < 1.01, (steps, loss, faultless)
