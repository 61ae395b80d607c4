"""A run as one of its machines sees it."""

from typing import NamedTuple

from torch_lowcomm.membership.heartbeat import Heartbeat
from torch_lowcomm.seed_replay.store.join_requests import JoinRequests
from torch_lowcomm.seed_replay.store.keys import RunStore
from torch_lowcomm.seed_replay.store.names import Names


class Run(NamedTuple):
    """A run at a store, and this machine in it.

    Attributes:
        store: The run's keys.
        requests: Join requests at the store.
        names: Numbers, names and places of the machines.
        beat: Tells by name which machines are alive, and which were and are so no longer.
        machine: This machine's number.
    """

    store: RunStore
    requests: JoinRequests
    names: Names
    beat: Heartbeat
    machine: int
