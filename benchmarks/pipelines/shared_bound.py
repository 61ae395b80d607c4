"""As torch_lowcomm/planner/schedule.py, for hosts in a lab: one link for both of a stage's streams, which share it evenly."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from torch_lowcomm.planner.schedule import Direction, Order, Times

Key = tuple[int, str, int, int]  # receiving stage, "F" or "B", step, micro-batch
_INSTANT_S = 1e-9  # what rounding leaves of a message's time


@dataclasses.dataclass
class Host:
    """The messages that wait in a stage's two streams, each with the bytes that are left of it."""

    link: Direction
    streams: tuple[collections.deque[tuple[Key, float]], ...]
    idle_since_s: float = float("-inf")

    def send(self, key: Key, size: float, stream: int, now: float) -> None:
        """Begins, or queues behind others of the stream; what a pause has filled the shaper's bucket with is free."""
        if not any(self.streams):
            size -= min(self.link.burst_bytes, (now - self.idle_since_s) * self.link.bytes_per_s)
        self.streams[stream].append((key, max(size, 0.0)))

    def next_s(self) -> float:
        """Seconds until one of its messages has gone."""
        active = [stream[0][1] for stream in self.streams if stream]
        return min(active) * len(active) / self.link.bytes_per_s if active else float("inf")

    def go_on(self, seconds: float, now: float) -> list[Key]:
        """Sends for so long, until now; returns the messages that have gone."""
        active = [stream for stream in self.streams if stream]
        gone = []
        for stream in active:
            key, left = stream[0]
            left -= seconds * self.link.bytes_per_s / len(active)
            if left > _INSTANT_S * self.link.bytes_per_s:
                stream[0] = (key, left)
            else:
                stream.popleft()
                gone.append(key)
        if active and not any(self.streams):
            self.idle_since_s = now
        return gone


def step_s(orders: Sequence[Order], times: Times, link: Direction, *, steps: int = 4) -> float:
    """The seconds of a step among others, as schedule.step_s(), where each stage sends both ways by one link. A message that
    begins while the other stream has one takes half of the rate from then on.
    """
    count = len(orders)
    hosts = [Host(link, (collections.deque(), collections.deque())) for _ in range(count)]
    program = [[(kind, step, i) for step in range(steps) for kind, i in one] for one in orders]
    at, until = [0] * count, [float("inf")] * count  # what a stage computes, or will; when it has
    arrived: dict[Key, float] = {}
    ends: list[float] = []  # of the first stage's steps
    now = 0.0
    while any(at[s] < len(program[s]) for s in range(count)):
        waited: list[float] = []
        for s in range(count):
            if until[s] < float("inf") or at[s] == len(program[s]):
                continue
            kind, step, i = program[s][at[s]]
            waits = s > 0 if kind == "F" else s < count - 1
            ready = arrived.get((s, kind, step, i), float("inf")) if waits else now
            if ready <= now:
                until[s] = now + (times.forward_s if kind == "F" else times.backward_s)[s]
            else:
                waited.append(ready)
        following = min(*until, *waited, *(now + host.next_s() for host in hosts))
        if following == float("inf"):
            raise ValueError(f"orders: expected ones that end, got stages that wait at {at}")
        for host in hosts:
            for key in host.go_on(following - now, following):
                arrived[key] = following + link.delay_s
        now = following
        for s in range(count):
            if until[s] <= now:
                kind, step, i = program[s][at[s]]
                if kind == "F" and s < count - 1:
                    hosts[s].send((s + 1, kind, step, i), times.activation_bytes[s], 0, now)
                if kind == "B" and s > 0:
                    hosts[s].send((s - 1, kind, step, i), times.gradient_bytes[s - 1], 1, now)
                at[s], until[s] = at[s] + 1, float("inf")
                if s == 0 and at[s] % len(orders[0]) == 0:
                    ends.append(now)
    return (ends[-1] - ends[0]) / (steps - 1)
