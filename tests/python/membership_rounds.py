"""Rounds of a Membership in one process: machines at a store, and signs of life as a test says."""

import math
import time

import torch.distributed as dist


class Beat:
    """Signs of life, as the test says."""

    interval_s = 0.0

    def __init__(self, alive, left=()):
        self.machines, self.left, self.training, self.lost = set(alive), left, set(), set()

    def alive(self):
        return set(self.machines)

    def gone(self):
        return self.lost

    def has_come_back(self, machine):
        return False

    def has_left(self, machine):
        return machine in self.left

    def stepped_at(self, machine):
        return time.monotonic() if machine in self.training else -math.inf

    def is_current(self):
        return True


def client(store):
    """Another client of a store, with a deadline for every call."""
    from torch_lowcomm.membership.patient_store import PatientStore

    return PatientStore(dist.TCPStore("127.0.0.1", store.port, is_master=False), 20.0)


def rounds_at(store):
    """Returns rounds(name, beat, min_machines, patience_s, timeout_s): a machine's Rounds, with a client of its own."""
    from torch_lowcomm.membership.rounds import Rounds

    def rounds(name, beat, min_machines=2, patience_s=0.0, timeout_s=20.0):
        return Rounds(client(store), name, beat, min_machines=min_machines, patience_s=patience_s, timeout_s=timeout_s)

    return rounds
