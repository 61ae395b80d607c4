"""Seconds of an all_reduce between two ranks on one device, by copies and by codes alone. Judged by nobody."""

import os
import time

import torch
import torch.distributed as dist

REPETITIONS = 7
CODEC = "all_reduce=sym4:bucket=1024"
CASES = {"exact": ("", False), "copied": (CODEC, False), "staged": (CODEC, True)}
RATES = ("1gbit", "100mbit")  # and as fast as it goes


def speed(t):
    facts = {"mib": t.either(64, 1)}
    for name, (policy, staged) in CASES.items():
        facts[f"{name}_s"] = _seconds(t, policy=policy, encode_on_device=staged)
        for rate in RATES if policy else ():
            t.end()  # the endpoint goes with its last group, and the next one reads the variable
            os.environ["LOWCOMM_RATE"] = rate
            facts[f"{name}, {rate}, s"] = _seconds(t, policy=policy, encode_on_device=staged)
            del os.environ["LOWCOMM_RATE"]
    return facts


def _seconds(t, **options):
    """The median of some ops."""
    t.init(**options)
    x = torch.randn((t.either(64, 1) << 20) // 4, device=t.device)
    seconds = []
    for _ in range(REPETITIONS):
        y = x.clone()
        t.synchronize()
        start = time.monotonic()
        dist.all_reduce(y)
        t.synchronize()
        seconds.append(time.monotonic() - start)
    return sorted(seconds)[REPETITIONS // 2]
