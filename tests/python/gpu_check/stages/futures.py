"""A reader of a future's values has them, in whichever way it waits: what hooks of DDP build on."""

import torch
import torch.distributed as dist
from torch.futures import collect_all


def _wait(futures):
    for future in futures:
        future.wait()


def _then(futures):
    for future in futures:
        future.then(lambda done: done.value()).wait()


def _collect_and_wait(futures):
    collect_all(futures).wait()
    _wait(futures)


def _values_inside(futures):
    """As a hook does that hands DDP the future of all: the one which collect_all makes knows of no device."""
    collect_all(futures).then(lambda done: [future.value() for future in done.value()]).wait()


WAYS = {"wait": _wait, "then": _then, "collect_all": _collect_and_wait, "collect_all, then values": _values_inside}


def futures(t):
    wrong = set()
    for staged in (True, False):
        t.init(policy="all_reduce=sym8:bucket=1024", encode_on_device=staged)
        source = torch.arange(t.either(1 << 23, 1 << 12), dtype=torch.float32).remainder(97)
        expected = source.clone()
        dist.all_reduce(expected)
        source, expected = source.to(t.device), expected.to(t.device)
        for name, way in WAYS.items():
            for _ in range(t.either(5, 1)):
                xs = [source.clone() for _ in range(2)]
                way([dist.all_reduce(x, async_op=True).get_future() for x in xs])
                read = [x * 1 for x in xs]  # enqueued at once, on the stream that waited
                if not all(y.equal(expected) for y in read):
                    wrong.add(f"{name}, staged={staged}")
    assert not wrong, f"values were read before they were there: {sorted(wrong)}"
