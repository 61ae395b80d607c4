"""Sites of several ranks that come and go, each a launcher of its own: a rank's death is its site's, and the others go on."""

import functools
import signal

import pytest
import ranks
import torch
import torch.distributed as dist
from site_rank import DEADLINE_S, HIDDEN, SiteRank, die, expect_equal
from torch import nn

import torch_lowcomm as lc


def _given():
    """Bytes that this rank has sent to a site that took the outer state over."""
    ops = [op for record in lc.flight_record().values() for op in record["ops"]]
    return sum(op["sent_bytes"] for op in ops if op["op"] == "DiLoCoX: take over the outer state")


def _joins(r, port, sizes, hows, options):
    """Sites of so many ranks begin, but for the last, which joins them with another model of the same shapes.

    Args:
        hows: How the sites that begin share the model, and how the last one does.
    """
    number = next(n for n in range(len(sizes)) if r.rank < sum(sizes[: n + 1]))
    site = ("abc"[number], sizes[number], r.rank - sum(sizes[:number]))
    begins, first = number < len(sizes) - 1, sizes[0]
    if not begins:
        r.hear("begun")
    trained = SiteRank(r, port, site, hows[not begins], seed=0 if begins else 5, lost_after_s=10.0, **options)
    if begins:
        trained.steps_until(len(sizes) - 1)
        trained.steps_together(9)
        before = trained.outer_validation()
        if r.rank == 0:
            r.say("begun")
    trained.steps_until(len(sizes))
    report = trained.opt.report
    assert len(report["stripe_elements"]) == first, "as many as the first site has ranks"
    if begins:
        assert trained.lost == [] and report["stripes"] == [site[2]]
        assert _given() > 0, "every site gives"
    else:
        assert report["stripes"] == list(range(site[2], first, site[1]))
        assert report["outer_steps"] > 0
    if "rank" not in options:  # outer parameters and momentum; with a rank, factors too
        taken = 0 if begins else 8 * sum(report["stripe_elements"][stripe] for stripe in report["stripes"])
        assert report["taken_bytes"] == taken
    given = _given() if begins else 0
    trained.steps_together(12)
    if begins:
        assert trained.outer_validation() <= 1.01 * before
    return given, report["taken_bytes"], trained.ended()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "hows", "options"),
    [
        ((4, 4, 2), ("fsdp2", "fsdp2"), {"mode": "continue"}),
        ((2, 4), ("fsdp2", "hsdp"), {"mode": "sync", "rank": 4}),
    ],
    ids=["fsdp2", "hsdp"],
)
def test_a_site_with_another_sharding_joins(store, sizes, hows, options):
    found = ranks.run_ranks(_joins, sum(sizes), store.port, sizes, hows, options, timeout=DEADLINE_S)
    assert sum(given for given, *_ in found) > sum(taken for _, taken, _ in found), "nothing goes through the store"
    expect_equal([ended for *_, ended in found])


def _comes_back(r, port, how):
    """A rank of the second of two sites is killed, and the site comes back under its id with new processes."""
    again = r.rank >= 4
    if again:
        r.hear("alone", timeout_s=60)
    site = ("ab"[r.rank >= 2], 2, r.rank % 2)
    trained = SiteRank(_Elsewhere(r) if again else r, port, site, how, seed=int(again), mode="sync")
    trained.steps_until(2)
    if not again:
        trained.steps_together(6)
        if r.rank == 3:
            die()
        if r.rank == 2:
            with pytest.raises(dist.DistBackendError):
                trained.steps(20)
            r.say("told")  # and its launcher ends it
            die()
        r.hear("told")
        trained.steps_until(1)
        trained.steps(6)
        if r.rank == 0:
            r.say("alone")
        trained.steps_until(2)
    trained.steps_together(9)
    return trained.ended()


class _Elsewhere:
    """The harness's rank, whose site has another rendezvous: that of the name before it, or one for all names."""

    def __init__(self, r, one=None):
        self.rank, self._r, self._one = r.rank, r, one

    def path(self, name):
        return self._r.path(self._one or name + "-again")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pipeline", "fsdp2"])
def test_a_site_comes_back_of_which_a_rank_was_killed(store, how):
    gone = {2: -signal.SIGKILL, 3: -signal.SIGKILL}
    ended = ranks.run_ranks(_comes_back, 6, store.port, how, timeout=DEADLINE_S, allow_exit=gone)
    for place in range(2):
        expect_equal([ended[place], ended[4 + place]])


def _resumes(r, port, what):
    """A site of two ranks trains and saves; its ranks go on from there as new processes."""
    again = r.rank >= 2
    site = ("a", 2, r.rank % 2)
    if not again:
        trained = SiteRank(r, port, site, "fsdp2", mode="sync")
        trained.steps(9)
        torch.save(trained.opt.state_dict(), r.path(f"state{r.rank}"))
        found = trained.opt.steps, trained.outer_validation()
        trained.members.leave()
        r.say(f"left{r.rank}")
        return found
    for rank in range(2):
        r.hear(f"left{rank}", timeout_s=60)
    state = torch.load(r.path(f"state{r.rank - 2}"), weights_only=False)
    if r.rank == 3:
        state = {"saved": state, "none": None, "other": {}}[what]
    try:
        trained = SiteRank(_Elsewhere(r), port, site, "fsdp2", seed=5, mode="sync", resume=state)
    except (ValueError, dist.DistBackendError) as error:
        return str(error)
    found = trained.opt.steps, trained.outer_validation()
    trained.steps(8)
    trained.ended()
    return found


# What the second rank has in its state's place, and what the ranks are told.
NO_STATE = {
    "none": ("resume: expected states of one inner step on all ranks of the site, got [9, 0] by rank", "got [9, 0]"),
    "other": ("membership: expected no error in this site, got rank 1's: ", "DiLoCoX"),
}


@pytest.mark.later
@pytest.mark.parametrize("what", ["saved", *NO_STATE])
def test_a_site_goes_on_from_what_its_ranks_saved(store, what):
    found = ranks.run_ranks(_resumes, 4, store.port, what, timeout=DEADLINE_S)
    if what == "saved":
        assert len(set(found)) == 1 and found[0][0] == 9
    else:
        assert all(said in text for said, text in zip(NO_STATE[what], found[2:], strict=True)), found


# An id that another machine has, and other options, are refused as those of machines of one rank (test_diloco_elastic.py).
MISTAKES = {
    "ids": ["machine_id: expected one for all ranks of the site, got ['a', 'a1'] by rank"],
    "model": [
        "DiLoCoX: expected what the other machines of this store have, '0.weight[512:600][88,64]",
        "got '0.weight[512:601][89,64]",
    ],
    "parts": ["DiLoCoX: expected a model in 1 parts, as the other sites of this store have, got 2"],
}


@pytest.mark.later
@pytest.mark.parametrize("what", MISTAKES)
@pytest.mark.on(4, timeout=DEADLINE_S)
def test_mistakes_of_a_site_are_named(r, port, what):
    """Two sites of two ranks; the second makes the mistake. Where their ids differ there is one."""
    second = r.rank >= 2
    site, hidden, how = ("ab"[second], 2, r.rank % 2), HIDDEN, "fsdp2"
    if what == "ids":
        if second:
            return
        site = (("a", "a1")[r.rank], 2, r.rank)
    if second:
        r.hear("first")
        hidden = HIDDEN + (what == "model")
        how = "pipeline" if what == "parts" else how
    make = functools.partial(
        SiteRank, _Elsewhere(r, "one-site") if what == "ids" else r, port, site, how, hidden=hidden
    )
    if second or what == "ids":
        with pytest.raises(ValueError) as error:
            make()
        assert all(said in str(error.value) for said in MISTAKES[what]), error.value
        r.say(f"refused{r.rank}")
        return
    trained = make()
    if r.rank == 0:
        r.say("first")
    refused = [False]
    while not refused[0]:  # the first site trains on meanwhile
        trained.steps(1, pause_s=0.02)
        refused = [r.path("refused2").exists() and r.path("refused3").exists()]
        dist.broadcast_object_list(refused, 0)
    trained.steps(8)
    assert trained.lost == [] and trained.members.formed.number == 1, "nothing was sent to it"
    trained.members.leave()


ADAPTIVE = {"codec": "sym8:bucket=64", "rank": 16, "adapt_sync_every": True}


def _one_and_two(r, port, first, options):
    """A site of one rank and one of two; `first` of them begins."""
    alone = r.rank == 0
    site = ("a", 1, 0) if alone else ("b", 2, r.rank - 1)
    begins = alone == (first == 1)
    if not begins:
        r.hear("begun")
    trained = SiteRank(r, port, site, "fsdp2", seed=0 if begins else 5, mode="sync", lost_after_s=10.0, **options)
    if begins:
        trained.steps(30)
        if r.rank == first - 1:
            r.say("begun")
    trained.steps_until(2)
    trained.steps_together(9)
    report = trained.opt.report
    assert report["participating"] == 2 and len(report["stripe_elements"]) == first
    return report["stripes"], (report["rank"], report["sync_every"]), trained.ended()


@pytest.mark.later
@pytest.mark.parametrize(("first", "options"), [(1, {}), (2, ADAPTIVE)], ids=["fixed", "adaptive"])
def test_a_site_of_one_rank_meets_one_of_two(store, first, options):
    found = ranks.run_ranks(_one_and_two, 3, store.port, first, options, timeout=DEADLINE_S)
    assert len({adapted for _, adapted, _ in found}) == 1
    assert not options or found[0][1][0] < options["rank"]
    assert [stripes for stripes, *_ in found] == ([[0], [0], []] if first == 1 else [[0, 1], [0], [1]])
    expect_equal([ended for *_, ended in found])


@pytest.mark.parametrize("what", ["fsdp2", "cluster"])
@pytest.mark.on("pair", group={"timeout_s": 20})
def test_a_membership_of_each_rank_of_a_site_is_refused(r, port, what):
    """Two ranks that share one model, each of which makes a membership without site=."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(8, 8)
    if what == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    given = {"cluster": dist.group.WORLD} if what == "cluster" else {}
    members = lc.Membership(dist.TCPStore("127.0.0.1", port, is_master=False), f"machine{r.rank}")
    with pytest.raises(ValueError, match=rf"made with site=, \[0, 1\], got one of the ranks \[{r.rank}\]$"):
        lc.DiLoCoX(torch.optim.SGD(model.parameters(), lr=0.1), 4, model=model, group=members, **given)
    members.leave()
