"""A small problem for machines of a seed replay, stepped by hand: what the optimizer does, with its phases in sight."""

import pickle
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_lowcomm import _C
from torch_lowcomm.seed_replay.store.exchange import StoreExchange

OPTIONS = {
    "noise": "rademacher",
    "codec": "logbyte",
    "lr_scale": "sqrt",
    "seed": 7,
    "pool": 0,
    "base": "",
}


EXCHANGE = {
    "min_machines": 2,
    "deadline_least_s": 3.0,
    "deadline_most_s": 20.0,
    "lost_after_s": 2.0,
    "timeout": timedelta(seconds=60),
}
EPS, LR, NAN = 1e-3, 1e-2, float("nan")


class Machine:
    """A machine at a store: a linear model, an exchange, and data of its own."""

    def __init__(self, port, name, *, width=12, samples=2, weights=0, options=None, **exchange):
        torch.manual_seed(weights)
        self.weight, self.bias = torch.randn(4, width), torch.zeros(4)
        self.samples, self.lr, self.spoilt = samples, LR, False
        self.options = OPTIONS | (options or {})
        self.core = self.another_core({})
        self.name, self.given = name, EXCHANGE | exchange
        self.reach(port)
        self.draws = torch.Generator().manual_seed(self.exchange.machine % (1 << 32))

    def another_core(self, options):
        """Of the same weights."""
        parameters = [("weight", self.weight, True, 0), ("bias", self.bias, False, 0)]
        return _C.SeedReplay(parameters, self.options | options)

    def reach(self, port):
        """At a store, with the weights that it has."""
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.exchange = StoreExchange(self.store, self.name, **self.given)
        self.exchange.attach(self.save, self.load)
        return self

    def save(self):
        return pickle.dumps((self.core.iteration, self.weight, self.bias))

    def load(self, data):
        iteration, weight, bias = pickle.loads(data)
        self.weight.copy_(weight)
        self.bias.copy_(bias)
        self.core.iteration = iteration

    def join(self):
        self.exchange.join(self.core)
        return self

    def loss(self, weight, bias, x):
        if self.spoilt:
            return NAN
        return (x @ weight.T + bias - x[:, :4]).square().mean().item()

    def message(self):
        """Two losses a sample, and their byte."""
        estimates = []
        for sample in range(self.samples):
            x = torch.randn(16, self.weight.shape[1], generator=self.draws)
            there, back = (
                self.loss(*(self.core.perturbed(i, self.exchange.machine, sample, s * EPS) for i in range(2)), x)
                for s in (1, -1)
            )
            estimates.append((there - back) / (2 * EPS))
        return self.core.message(self.exchange.machine, estimates)

    def step(self):
        """One iteration; returns its record."""
        record = self.exchange.exchange(self.core, self.message(), lr=self.lr, weight_decay=0.0)
        self.core.apply(record)
        return record

    def until(self, iteration, pause_s=0.0):
        while self.core.iteration < iteration:
            self.step()
            time.sleep(pause_s)
        return self

    def posted(self, iteration):
        """The number of machines that have posted in an iteration, and counted."""
        return self.store.add(f"lowcomm/replay/p{iteration}", 0)

    def validation(self):
        x = torch.randn(256, self.weight.shape[1], generator=torch.Generator().manual_seed(99))
        return (x @ self.weight.T + self.bias - x[:, :4]).square().mean().item()


def machines_of(record):
    return _C.read_replay_records(record)[0]["machines"]


def end_together(r, machine, ready, pause_s=0.01):
    """Rank 0 goes on until it is ready, and names the iteration that all stop before. Returns what all have alike then."""
    deadline = time.monotonic() + 100
    while not r.path("end").exists():
        assert time.monotonic() < deadline, machine.exchange.stats()
        if r.rank == 0 and ready(machine):
            r.say("end", machine.core.iteration + 10)
        else:
            machine.step()
            time.sleep(pause_s)
    machine.until(int(r.hear("end")))
    ended = machine.core.iteration, machine.core.checksum()
    machine.exchange.leave()
    return ended


def machines_by_iteration(log):
    """By iteration, who is in its record."""
    return {record["iteration"]: record["machines"] for record in _C.read_replay_records(log)}
