"""A rank of a site that comes and goes, for the tests of lc.DiLoCoX over sites: trains, loses other sites, and goes on."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ranks.child import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc

DEADLINE_S = 150
# Outer steps of a few inner ones: DiLoCo's 0.7 and 0.9 would go 7 times as far as training does, and diverge.
OPTIONS = {"sync_every": 4, "codec": "sym4:bucket=64", "check_every": 1, "outer_lr": 0.5, "outer_momentum": 0.3}
WIDTH, HIDDEN, OUT = 64, 600, 8
# So gentle that an outer step without a fault moves the loss of the outer parameters up by at most half a percent (150 of
# them, with two sites and batches of 64): a bound of 1 % over a fault and the two outer steps after it is one on the fault.
BATCH, LR = 512, 5e-4
_stores = []  # that this process keeps
_MEMBERSHIP = {"min_machines": 1, "lost_after_s": 3.0, "timeout_s": 12.0}


class SiteRank:
    """A rank of a site: a launcher's process group, the model in this site's way, and an outer loop over the sites.

    Args:
        r: The harness's rank.
        port: The store's.
        site: (name, ranks of it, this one's place).
        how: "fsdp2", "ddp", "hsdp" (two replicas), or "pipeline" (two stages, which send activations and their gradients).
        seed: Of the first parameters.
        hidden: Width between the two layers.
        norm: Whether the model has running means.
        bound: Of the loss of the outer parameters around a fault / that before it.
        site_timeout_s: Progress deadline of the launcher's process group, if not that of the Membership.
        options: Of DiLoCoX and of Membership; `store_host`, if the store is on another host.
    """

    def __init__(
        self, r, port, site, how, seed=0, hidden=HIDDEN, norm=False, bound=1.01, site_timeout_s=None, **options
    ):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.name, size, self.place = site
        members = {name: options.pop(name, default) for name, default in _MEMBERSHIP.items()}
        timeout_s = members.pop("timeout_s")
        members["patience_s"] = options.pop("patience_s", 0.9 * timeout_s)
        store_host = options.pop("store_host", "127.0.0.1")
        dist.init_process_group(
            "lowcomm",
            store=dist.FileStore(str(r.path(f"site-{self.name}")), size),
            rank=self.place,
            world_size=size,
            timeout=timedelta(seconds=site_timeout_s or timeout_s),
        )
        torch.manual_seed(seed)
        first, last = (nn.Linear(WIDTH, hidden), nn.Tanh()), nn.Linear(hidden, OUT)
        if norm:
            first += (nn.BatchNorm1d(hidden),)
        self.stage, self.other = (self.place, 1 - self.place) if how == "pipeline" else (None, None)
        stages = {None: (*first, last), 0: first, 1: (last,)}
        self.model = nn.Sequential(*stages[self.stage])
        if how in ("fsdp2", "hsdp"):
            shape = {"replicate": 2, "shard": size // 2} if how == "hsdp" else {"shard": size}
            mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
            fully_shard(self.model, mesh=mesh)
        elif how == "ddp":
            self.model = DistributedDataParallel(self.model)
        self.members = lc.Membership(
            dist.TCPStore(store_host, port, is_master=False),
            self.name,
            site=dist.group.WORLD,
            timeout=timedelta(seconds=timeout_s),
            **members,
        )
        options = OPTIONS | options
        inner = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.opt = lc.DiLoCoX(inner, group=self.members, model=self.model, **options)
        self.draws = torch.Generator().manual_seed(sum(self.name.encode()))
        self.lost = []
        self._fragments = options.get("fragments", 1)
        self._bound = bound
        self._bounded, self._checked = (-1, 0.0), -1  # (the last outer step that is bounded, by which loss); looked at

    def backward(self, x):
        """One step's gradients; a pipeline's stages send each other what they need."""
        if self.stage is None:
            self._error(self.model(x), x).backward()
        elif self.stage == 0:
            activations = self.model(x)
            dist.send(activations.detach(), self.other)
            gradient = torch.empty_like(activations)
            dist.recv(gradient, self.other)
            activations.backward(gradient)
        else:
            activations = torch.empty(len(x), HIDDEN)
            dist.recv(activations, self.other)
            self._error(self.model(activations.requires_grad_()), x).backward()
            dist.send(activations.grad, self.other)

    def validation(self):
        """The loss of the parameters as they are, equal on all ranks of the site."""
        x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(99))
        loss = torch.empty(())
        self.model.eval()
        with torch.no_grad():
            if self.stage is None:
                loss = self._error(self.model(x), x)
            elif self.stage == 0:
                dist.send(self.model(x), self.other)
                dist.recv(loss, self.other)
            else:
                activations = torch.empty(len(x), HIDDEN)
                dist.recv(activations, self.other)
                loss = self._error(self.model(activations), x)
                dist.send(loss, self.other)
        self.model.train()
        return loss.item()

    @staticmethod
    def _error(y, x):
        return (y - x[:, :OUT].sin()).square().mean()

    def outer_validation(self):
        """The loss of the outer parameters."""
        with self.opt.outer_parameters():
            return self.validation()

    def steps(self, count, pause_s=0.0):
        """Trains; a site that is lost costs an interval, and the outer parameters' loss goes on where it was."""
        for _ in range(count):
            self.backward(torch.randn(BATCH, WIDTH, generator=self.draws))
            with self.going_on():
                self.opt.step()
            self.opt.zero_grad()
            if self.opt.regroup_due:
                self._regroup()
            self._expect_loss()
            time.sleep(pause_s)

    @contextmanager
    def going_on(self):
        """Where a site is lost meanwhile, this one goes on in another group."""
        try:
            yield
        except dist.DistBackendError as error:
            self.lost.append(str(error))
            self._regroup()

    def _regroup(self):
        """A site keeps its outer parameters, or takes those of a site that has applied more averages."""
        before, outer_steps = self.outer_validation(), self.opt.report["outer_steps"]
        self.opt.regroup()
        assert self.opt.report["outer_steps"] >= outer_steps - self._fragments, "it has lost more than an interval"
        self._bounded = self.opt.report["outer_steps"] + 2, self._bound * before
        self._checked = -1
        self._expect_loss()

    def _expect_loss(self):
        """After a fault, and after each of the two outer steps that come then, the loss goes on where it was."""
        last, bound = self._bounded
        step = self.opt.report["outer_steps"]
        if step <= last and step != self._checked:
            self._checked = step
            loss = self.outer_validation()
            assert loss <= bound, (loss, bound, step, last, self.opt.report["taken_bytes"])

    def steps_until(self, sites):
        deadline = time.monotonic() + 0.6 * DEADLINE_S
        while len(self.members.formed.machines) != sites:
            assert time.monotonic() < deadline, self.members.formed
            self.steps(1, pause_s=0.02)

    def steps_together(self, count):
        """To a step that is the same at all sites, which have just formed their group."""
        last = self.opt.steps + count
        while self.opt.steps < last:
            self.steps(1)

    def until_outer_step(self, last, pause_s=0.0):
        """To the beginning of an outer step, which is the same at all sites."""
        while self.opt.report["outer_steps"] < last:
            self.steps(1, pause_s)

    def end_at(self, last):
        """Trains to an outer step, and ends there, in a group that holds: (outer steps, the whole parameters and the means)."""
        while True:
            self.until_outer_step(last)  # a site that was further on may have taken the others' count
            with self.going_on():
                return self.ended()

    def outer_state(self):
        """The outer state that this rank holds, equal at the same places of all sites."""
        (group,) = self.opt.state_dict()["param_groups"]
        return group[f"outer{self.place}"]

    def ended(self):
        """Ends the loop: (outer steps, the whole parameters and the running means)."""
        self.opt.finish()
        steps = self.opt.report["outer_steps"]
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.model.parameters()]
        means = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        bits = [tensor.detach().clone() for tensor in whole + means]
        self.members.leave()
        return steps, bits


def expect_equal(ended):
    """The same outer steps and bits at all ranks."""
    assert len({steps for steps, _ in ended}) == 1
    for _, bits in ended:
        assert all(torch.equal(a, b) for a, b in zip(bits, ended[0][1], strict=True))


def site_of(rank):
    """Of ranks in pairs: (name of the site, its ranks, this one's place)."""
    return "abc"[rank // 2], 2, rank % 2


def on_host(r, port, folder, namespaces):
    """Moves this rank to its host of a lab, and returns it with a folder of the test's; the first rank keeps the store."""
    r.enter(f"/run/netns/{namespaces[r.rank]}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    here = Rank(r.rank, r.size, folder)
    if r.rank == 0:
        _stores.append(dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False))
        here.say("serves")
    here.hear("serves")
    return here


def leave_host(here, *others):
    """Keeps the store until all others have ended, too."""
    here.say(f"ended{here.rank}")
    for rank in (rank for some in others for rank in some if here.rank == 0):
        here.hear(f"ended{rank}")


def die():
    """Ends this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def wake(pid):
    """Wakes up a process that stops itself, once it has: a SIGCONT that came before the SIGSTOP would be lost."""
    wait_until_stopped(pid)
    os.kill(pid, signal.SIGCONT)


def wait_until_stopped(pid, timeout_s=30.0):
    """Waits for a process that stops itself."""
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        assert time.monotonic() < deadline, f"process {pid} has not stopped"
        time.sleep(0.005)


def at(op, act, *, once=False):
    """Calls `act` on a thread while an op of this name is under way in any group; `once`: or when one has been.

    Ops that recur are met in the middle; one that comes once may be over before a thread sees it.
    """
    states = ("under way", "done") if once else ("under way",)

    def watch():
        while not any(
            found["op"] == op and found["state"] in states
            for record in lc.flight_record().values()
            for found in record["ops"]
        ):
            time.sleep(0.0002)
        act()

    threading.Thread(target=watch, daemon=True).start()
