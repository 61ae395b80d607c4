"""A run as its parts see it: its keys at the store, its head, join requests and names."""

from __future__ import annotations

from typing import NamedTuple

from torch_lowcomm.seed_replay.store.head import Head
from torch_lowcomm.seed_replay.store.join_requests import JoinRequests
from torch_lowcomm.seed_replay.store.keys import RunStore
from torch_lowcomm.seed_replay.store.names import Names


class Run(NamedTuple):
    """A run at a store.

    Attributes:
        store: The run's keys.
        head: The last known commit, and the way to propose another.
        requests: Join requests at the store.
        names: Numbers, names and places of the machines.
    """

    store: RunStore
    head: Head
    requests: JoinRequests
    names: Names
