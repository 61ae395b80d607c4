"""Seconds of an all_reduce of 4-bit codes over TCP at some rates, by copies and by codes alone. Judged by nobody."""

import os
import time

import torch
import torch.distributed as dist

RATES = ("", "1gbit", "100mbit")
REPETITIONS = 3


def rates(t):
    facts = {"mib": t.either(64, 1)}
    for rate in RATES:
        for way in ("copied", "staged"):
            t.end()  # the endpoint goes with its last group, and the next one reads the variable
            os.environ["LOWCOMM_RATE"] = rate
            if not rate:
                del os.environ["LOWCOMM_RATE"]
            t.init(policy="all_reduce=sym4:bucket=1024", encode_on_device=way == "staged", transport="tcp")
            x = torch.randn((facts["mib"] << 20) // 4, device=t.device)
            seconds = []
            for _ in range(REPETITIONS):
                y = x.clone()
                t.synchronize()
                start = time.monotonic()
                dist.all_reduce(y)
                t.synchronize()
                seconds.append(time.monotonic() - start)
            facts[f"{way}, {rate or 'as fast as it goes'}, s"] = sorted(seconds)[REPETITIONS // 2]
    return facts
