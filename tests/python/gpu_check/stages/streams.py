"""Ops keep the order of the caller's streams: tensors written late, read at once, freed early, with nobody waiting."""

import contextlib
import time

import torch
import torch.distributed as dist

SLEEP_CYCLES = 2_000_000  # of the GPU: a millisecond, which is long next to the enqueuing of an op


def streams(t):
    for staged in (True, False):
        t.init(policy="all_reduce=sym8:bucket=1024", encode_on_device=staged)
        n = t.either(1 << 20, 1 << 12)
        source = torch.arange(n, dtype=torch.float32).remainder(97)
        expected = source.clone()
        dist.all_reduce(expected)
        source = source.to(t.device)
        for turn in range(t.either(30, 2)):
            _late_and_at_once(t, source, expected, turn)
        for _ in range(t.either(20, 2)):
            _nobody_waits(t, source)


def _late_and_at_once(t, source, expected, turn):
    """Written on one stream while the op is issued, waited for on another, among memory that changes hands."""
    producer, consumer = (torch.cuda.Stream(), torch.cuda.Stream()) if t.cuda else (None, None)
    with torch.cuda.stream(producer) if t.cuda else contextlib.nullcontext():
        x = torch.full_like(source, -1.0)
        if t.cuda:
            torch.cuda._sleep(SLEEP_CYCLES)
        x.copy_(source, non_blocking=True)
        work = dist.all_reduce(x, async_op=True)
    others = torch.full_like(source, float(turn))
    with torch.cuda.stream(consumer) if t.cuda else contextlib.nullcontext():
        work.wait()
        y = x * 1
    if t.cuda:
        consumer.synchronize()
    assert y.cpu().equal(expected), f"turn {turn}: the stream that waited read other values than the sum"
    assert bool((others == turn).all()), f"turn {turn}: an op wrote into memory that is not its own"


def _nobody_waits(t, source):
    """An op whose Work and tensor are dropped once it is complete writes nothing any more: the memory has new owners."""
    x = source.clone()
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.0005)
    del work, x
    fresh = [torch.full_like(source, 3.0) for _ in range(3)]
    t.synchronize()
    assert all(bool((tensor == 3).all()) for tensor in fresh), "a completed op wrote into memory that was given away"
