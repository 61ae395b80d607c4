"""Times coded ops over TCP after pauses, on every host of a lab, as root.

    python benchmarks linklab run --hosts 2 --rate 100mbit -- python benchmarks/linklab/pauses.py [--no-restart]

Tensors of 16 MiB, float32 in `sym4:bucket=1024`; medians of 7. After a pause Linux begins a connection's congestion window
anew, but not with `--no-restart`, which sets net.ipv4.tcp_slow_start_after_idle to 0 on the host.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import torch_lowcomm as lc

ELEMENTS, REPETITIONS, PAUSES_S = 4 << 20, 7, (0.01, 1.0, 3.0)
CODEC = "sym4:bucket=1024"


def measure(name: str, call: Callable[[], object], pause_s: float) -> None:
    """Prints, on rank 0, the median milliseconds of a call that all ranks make after a pause."""
    call()
    seconds = []
    for _ in range(REPETITIONS):
        dist.barrier()
        time.sleep(pause_s)
        dist.barrier()
        start = time.monotonic()
        call()
        seconds.append(time.monotonic() - start)
    if dist.get_rank() == 0:
        print(f"{name:<15} after {pause_s:>5} s {1e3 * statistics.median(seconds):>8.2f} ms", flush=True)


def main() -> None:
    """Runs on one host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--no-restart", action="store_true", help="keep congestion windows, of all processes of this host"
    )
    if parser.parse_args().no_restart:
        Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options = lc.Options(policy=f"all_gather={CODEC};reduce_scatter={CODEC}", min_bytes=0, transport="tcp")
    group = dist.new_group(backend="lowcomm", pg_options=options)
    whole, part = torch.randn(ELEMENTS), torch.randn(ELEMENTS // dist.get_world_size())
    for pause_s in PAUSES_S:
        measure("all_gather", lambda: dist.all_gather_into_tensor(whole, part, group=group), pause_s)
        measure("reduce_scatter", lambda: dist.reduce_scatter_tensor(part, whole, group=group), pause_s)
    dist.destroy_process_group(group)
    dist.barrier()
    # Plain gloo may abort as its process ends, after everything is done: skip its teardown.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
