"""Sites of several ranks that come and go, each a launcher of its own: a rank's death is its site's, and the others go on."""

import contextlib
import os
import signal
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

DEADLINE_S = 150
OPTIONS = {"sync_every": 4, "codec": "sym4:bucket=64", "check_every": 1}
WIDTH = 64


class SiteRank:
    """A rank of a site: a launcher's process group, the model in this site's way, and an outer loop over the sites.

    Args:
        r: The harness's rank.
        port: The store's.
        site: (name, ranks of it, this one's place).
        how: "fsdp2" or "stages" (a pipeline whose stages train by themselves).
    """

    def __init__(self, r, port, site, how, seed=0, **options):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        import torch_lowcomm as lc

        self.name, size, self.place = site
        members = {"least": 1, "lost_after_s": 2.0, "timeout_s": 12.0} | {
            name: options.pop(name) for name in ("least", "lost_after_s", "timeout_s") if name in options
        }
        store = dist.FileStore(str(r.path(f"site-{self.name}")), size)
        dist.init_process_group(
            "lowcomm", store=store, rank=self.place, world_size=size, timeout=timedelta(seconds=members["timeout_s"])
        )
        torch.manual_seed(seed)
        layers = (nn.Linear(WIDTH, 600), nn.Tanh(), nn.Linear(600, 8))
        self.model = nn.Sequential(*layers)
        if how == "fsdp2":
            mesh = init_device_mesh("cpu", (size,))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.members = lc.Membership(
            dist.TCPStore("127.0.0.1", port, is_master=False),
            self.name,
            site=dist.group.WORLD,
            least=members["least"],
            lost_after_s=members["lost_after_s"],
            patience_s=0.9 * members["timeout_s"],
            timeout=timedelta(seconds=members["timeout_s"]),
        )
        inner = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.opt = lc.DiLoCoX(inner, group=self.members, model=self.model, **(OPTIONS | options))
        self.draws = torch.Generator().manual_seed(sum(self.name.encode()) + (self.place if how == "stages" else 0))
        self.lost = []

    def loss(self, x):
        return (self.model(x) - x[:, :8].sin()).square().mean()

    def steps(self, count, pause_s=0.0):
        for _ in range(count):
            self.loss(torch.randn(16, WIDTH, generator=self.draws)).backward()
            try:
                self.opt.step()
            except dist.DistBackendError as error:
                before, steps = self.validation(), self.opt.steps
                self.lost.append(str(error))
                self.opt.regroup()
                # A site that was behind has the others' parameters now.
                assert self.opt.steps != steps or self.validation() <= 1.01 * before
            self.opt.zero_grad()
            if self.opt.regroup_due:
                self.opt.regroup()
            time.sleep(pause_s)

    def steps_until(self, sites):
        deadline = time.monotonic() + DEADLINE_S / 3
        while len(self.members.formed.machines) != sites:
            assert time.monotonic() < deadline, self.members.formed
            self.steps(1, pause_s=0.02)

    def steps_together(self, count):
        """To a step that is the same at all sites, which have just formed their group."""
        last = self.opt.steps + count
        while self.opt.steps < last:
            self.steps(1)

    def validation(self):
        x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(99))
        with torch.no_grad():
            return self.loss(x).item()

    def ended(self):
        self.opt.finish()
        steps = self.opt.report["outer_steps"]
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.model.parameters()]
        bits = [p.detach().clone() for p in whole]
        self.members.leave()
        return steps, bits


def _expect_equal(ended):
    assert len({steps for steps, _ in ended}) == 1
    for _, bits in ended:
        assert all(torch.equal(a, b) for a, b in zip(bits, ended[0][1], strict=True))


def _site_of(rank):
    return "abc"[rank // 2], 2, rank % 2


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _ends_with_its_site(trained):
    """Ends as a launcher ends the other ranks of a site when one has died."""
    with contextlib.suppress(dist.DistBackendError):
        trained.steps(20)
    _die()


def _killed(r, port, mode):
    """A rank of the third site is killed; its launcher ends the other one. The two other sites lose one interval at most."""
    trained = SiteRank(r, port, _site_of(r.rank), "fsdp2", mode=mode)
    trained.steps_until(3)
    trained.steps_together(9)  # with mode continue a message is under way
    if r.rank == 5:
        _die()
    if r.rank == 4:
        _ends_with_its_site(trained)
    while not trained.lost:
        trained.steps(1)
    trained.steps_until(2)
    assert len(trained.lost) == 1 and trained.opt.report["participating"] == 2
    trained.steps_together(9)
    return trained.ended()


@pytest.mark.parametrize("mode", ["continue", "sync"])
def test_goes_on_without_a_killed_site(store, mode):
    gone = {4: -signal.SIGKILL, 5: -signal.SIGKILL}
    _expect_equal(ranks.run_ranks(_killed, 6, store.port, mode, timeout=DEADLINE_S, allow_exit=gone)[:4])


def _killed_while_joining(r, port):
    """The third site comes late, and one of its ranks is killed when it has met the others and takes nothing over yet."""
    joins = r.rank >= 4
    if joins:
        import torch_lowcomm as lc

        r.hear("begun")
        form = lc.Membership.form

        def formed(members, stripes):
            group = form(members, stripes)
            if r.rank == 5:
                _die()
            return group

        lc.Membership.form = formed
        with contextlib.suppress(dist.DistBackendError):
            SiteRank(r, port, _site_of(r.rank), "fsdp2", mode="sync", least=3)
        _die()
    trained = SiteRank(r, port, _site_of(r.rank), "fsdp2", mode="sync")
    trained.steps_until(2)
    trained.steps_together(6)
    if r.rank == 0:
        r.say("begun")
    met = trained.members.formed.number
    deadline = time.monotonic() + DEADLINE_S / 3
    while trained.members.formed.number < met + 2 or len(trained.members.formed.machines) != 2:
        assert time.monotonic() < deadline, trained.members.formed
        trained.steps(1, pause_s=0.02)
    trained.steps_together(9)
    return trained.ended()


def test_goes_on_where_a_site_dies_while_it_joins(store):
    gone = {4: -signal.SIGKILL, 5: -signal.SIGKILL}
    _expect_equal(ranks.run_ranks(_killed_while_joining, 6, store.port, timeout=DEADLINE_S, allow_exit=gone)[:4])


def _stopped(r, port):
    """Both ranks of the third site are stopped for longer than the deadline, and wake up to a group that is gone."""
    trained = SiteRank(r, port, _site_of(r.rank), "fsdp2", mode="continue", timeout_s=6.0)
    trained.steps_until(3)
    trained.steps_together(6)
    if r.rank >= 4:
        r.say(f"pid{r.rank}", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        trained.steps_until(2)
        if r.rank == 0:
            for rank in (4, 5):
                os.kill(int(r.hear(f"pid{rank}")), signal.SIGCONT)
    while r.rank >= 4 and not trained.lost:
        trained.steps(1)
    trained.steps_until(3)
    trained.steps_together(12)
    return trained.ended()


def test_a_stopped_site_comes_back(store):
    _expect_equal(ranks.run_ranks(_stopped, 6, store.port, timeout=DEADLINE_S))


def _joins(r, port, first, options):
    """A site of `first` ranks begins; another of 6 - first ranks, with another model of the same shapes, joins it."""
    begins = r.rank < first
    site = ("a", first, r.rank) if begins else ("b", 6 - first, r.rank - first)
    if not begins:
        r.hear("begun")
    trained = SiteRank(r, port, site, "fsdp2", seed=0 if begins else 5, lost_after_s=10.0, **options)
    if begins:
        trained.steps(9)
        before = trained.validation()
        if r.rank == 0:
            r.say("begun")
    trained.steps_until(2)
    report = trained.opt.report
    assert len(report["stripe_elements"]) == first, "as many as the first site has ranks"
    if begins:
        assert trained.lost == [] and report["stripes"] == [r.rank]
    else:
        assert report["stripes"] == list(range(site[2], first, site[1]))
        assert report["outer_steps"] > 0
    if "rank" not in options:  # outer parameters and momentum; with a rank, factors too
        taken = 0 if begins else 8 * sum(report["stripe_elements"][stripe] for stripe in report["stripes"])
        assert report["taken_bytes"] == taken
    trained.steps_together(12)
    if begins:
        assert trained.validation() < 1.2 * before
    return trained.ended()


@pytest.mark.parametrize("first", [4, 2])
@pytest.mark.parametrize(
    "options", [{"mode": "continue"}, {"mode": "sync", "rank": 4, "outer_lr": 0.5, "outer_momentum": 0.3}], ids=str
)
def test_a_site_with_another_sharding_joins(store, first, options):
    _expect_equal(ranks.run_ranks(_joins, 6, store.port, first, options, timeout=DEADLINE_S))


def _stages(r, port):
    """Two sites of two stages; a stage of the second is killed, and its site comes back with new processes."""
    again = r.rank >= 4
    if again:
        r.hear("alone", timeout_s=60)
    site = ("ab"[min(r.rank // 2, 1)], 2, r.rank % 2)
    trained = SiteRank(_Elsewhere(r) if again else r, port, site, "stages", seed=int(again), mode="sync")
    trained.steps_until(2)
    if not again:
        trained.steps_together(6)
        if r.rank == 3:
            _die()
        if r.rank == 2:
            _ends_with_its_site(trained)
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


def test_stages_of_a_site_come_back_together(store):
    gone = {2: -signal.SIGKILL, 3: -signal.SIGKILL}
    ended = ranks.run_ranks(_stages, 6, store.port, timeout=DEADLINE_S, allow_exit=gone)
    for stage in range(2):
        _expect_equal([ended[stage], ended[4 + stage]])


def _mistaken(r, port, what):
    """Two sites of two ranks; the second makes the mistake."""
    second = r.rank >= 2
    if what == "ids":
        site = (f"a{r.rank}" if r.rank == 1 else "a", 2, r.rank)
        if second:
            return ""
        site_rank = _Elsewhere(r, "one-site")
    else:
        site = ("a" if what == "twice" else "ab"[r.rank // 2], 2, r.rank % 2)
        site_rank = _Elsewhere(r) if second else r
    if second:
        r.hear("first")
    options = {"sync_every": 5} if what == "options" and second else {}
    how = "stages" if what == "parts" and second else "fsdp2"
    try:
        trained = SiteRank(site_rank if what != "ids" else _Elsewhere(r, "one-site"), port, site, how, **options)
    except ValueError as error:
        r.say(f"refused{r.rank}")
        return str(error)
    if r.rank == 0:
        r.say("first")
    for rank in (2, 3):
        r.hear(f"refused{rank}", timeout_s=60)
    trained.members.leave()
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("ids", "machine_id: expected one for all ranks of the site, got ['a', 'a1'] by rank"),
        ("twice", "machine_id: expected one that no living machine has, got 'a'"),
        ("options", "DiLoCoX: expected what the other machines of this store have"),
        ("parts", "DiLoCoX: expected a model in 1 parts, as the other sites of this store have, got 2"),
    ],
)
def test_mistakes_of_a_site_are_named(store, what, said):
    found = ranks.run_ranks(_mistaken, 4, store.port, what, timeout=DEADLINE_S)
    for text in found[:2] if what == "ids" else found[2:]:
        assert said in text, found


ADAPTIVE = {
    "codec": "sym8:bucket=64",
    "rank": 6,
    "adapt_sync_every": True,
    "window": 6,
    "energy": 0.3,
    "min_sync_every": 1,
}


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


@pytest.mark.parametrize("options", [{}, ADAPTIVE], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("first", [1, 2])
def test_a_site_of_one_rank_meets_one_of_two(store, first, options):
    found = ranks.run_ranks(_one_and_two, 3, store.port, first, options, timeout=DEADLINE_S)
    assert len({adapted for _, adapted, _ in found}) == 1
    assert not options or found[0][1][0] < options["rank"]
    assert [stripes for stripes, *_ in found] == ([[0], [0], []] if first == 1 else [[0, 1], [0], [1]])
    _expect_equal([ended for *_, ended in found])


def _machines_of_one_model(r, port):
    """Two ranks that shard one model, each of which makes a membership without site=."""
    import torch_lowcomm as lc

    r.init(timeout_s=20)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    members = lc.Membership(dist.TCPStore("127.0.0.1", port, is_master=False), f"machine{r.rank}")
    with pytest.raises(ValueError) as caught:
        lc.DiLoCoX(torch.optim.SGD(model.parameters(), lr=0.1), 4, model=model, group=members)
    members.leave()
    return str(caught.value)


def test_a_membership_of_each_rank_of_a_site_is_refused(store, pair):
    for rank, said in enumerate(pair(_machines_of_one_model, store.port)):
        assert said.endswith(f"made with site=, [0, 1], got one of the ranks [{rank}]"), said
