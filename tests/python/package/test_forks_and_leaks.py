"""Forks before and next to a group, and groups made again and again: nothing inherited breaks, nothing is left."""

import gc
import multiprocessing
import os
import time

import pytest
import ranks
import torch.distributed as dist
from group_check import check_group


def _forked(r, folder):
    import torch_lowcomm  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
    processes = []
    for rank in range(2):
        context = multiprocessing.get_context("fork")
        processes.append(context.Process(target=_fork_child, args=(ranks.Rank(rank, 2, folder),)))
        processes[-1].start()
    for process in processes:
        process.join(40)
    return [process.exitcode for process in processes]


def _fork_child(r):
    r.init("lowcomm")
    check_group(r)
    dist.destroy_process_group()


def test_ranks_may_be_forked(tmp_path):
    """The package is imported, registered, and then the process forks its ranks."""
    assert ranks.run_ranks(_forked, 1, str(tmp_path), start="spawn") == [[0, 0]]


def _open_things():
    gc.collect()
    descriptors = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            descriptors[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
    return len(os.listdir("/proc/self/task")), descriptors


@pytest.mark.later
@pytest.mark.on(2, timeout=120)
def test_repeated_groups_leak_nothing(r):
    counts = []
    for _ in range(20):
        r.init("lowcomm")
        check_group(r)
        check_group(r, dist.new_group())
        dist.destroy_process_group()
        time.sleep(0.01)
        # A thread that was joined stands in /proc for a moment, longer on a busy machine.
        end = time.monotonic() + 10
        threads, descriptors = _open_things()
        while len(counts) > 3 and threads > counts[3][0] and time.monotonic() < end:
            time.sleep(0.01)
            threads, descriptors = _open_things()
        counts.append((threads, len(descriptors)))
    settled, descriptors = counts[3], sorted(descriptors.values())
    assert all(c[0] <= settled[0] for c in counts[3:]), f"threads after each round: {[c[0] for c in counts]}"
    assert all(c[1] <= settled[1] for c in counts[3:]), f"descriptors: {[c[1] for c in counts]}: {descriptors}"
