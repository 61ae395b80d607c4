"""A machine that comes and goes by itself, and trains a small model."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

import torch_lowcomm as lc

OPTIONS = {"sync_every": 4, "codec": "sym4:bucket=64", "check_every": 1}


def join(port, name, **options):
    """A Membership at the store of this port."""
    options = {"min_machines": 2, "lost_after_s": 2.0, "timeout": timedelta(seconds=20)} | options
    options = {"patience_s": options["timeout"].total_seconds() * 0.9} | options
    return lc.Membership(dist.TCPStore("127.0.0.1", port, is_master=False), name, **options)


class TrainingResult:
    """A small model that a machine trains towards a target of its own."""

    def __init__(self, members, seed, **options):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        self.draws = torch.Generator().manual_seed(seed)
        self.opt = lc.DiLoCoX(
            torch.optim.AdamW(self.model.parameters(), lr=1e-2), group=members, model=self.model, **(OPTIONS | options)
        )
        self.lost = []

    def steps(self, count, pause_s=0.0):
        """Inner steps; after a loss, or where somebody waits, in another group."""
        for _ in range(count):
            x = torch.randn(16, 32, generator=self.draws)
            loss = (self.model(x) - x[:, :8]).square().mean()
            loss.backward()
            try:
                self.opt.step()
            except dist.DistBackendError as error:
                before, steps = self.validation(), self.opt.steps
                self.lost.append(str(error))
                self.opt.regroup()
                # A machine that was behind has the others' parameters now; the others have theirs, or one outer step's more.
                assert self.opt.steps != steps or self.validation() <= 1.01 * before
            self.opt.zero_grad()
            if self.opt.regroup_due:
                self.opt.regroup()
            time.sleep(pause_s)
        return loss.item()

    def validation(self):
        x = torch.randn(256, 32, generator=torch.Generator().manual_seed(99))
        with torch.no_grad():
            return (self.model(x) - x[:, :8]).square().mean().item()

    def ends_with(self, members):
        """The outer parameters after some more outer steps, which end at the same step on all that have just formed a group."""
        last = self.opt.steps + 20
        while self.opt.steps < last:
            self.steps(1)
        outer = self.outer()
        members.leave()
        return outer

    def outer(self):
        self.opt.finish()
        return [p.detach().clone() for p in self.model.parameters()]
