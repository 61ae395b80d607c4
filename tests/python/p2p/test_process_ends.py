"""A process that ends with messages on their way: those that it has sent arrive, and no receive is left to Python's end."""

import os
import signal
import sys

import pytest
import ranks
import torch
import torch.distributed as dist
from site_rank import wait_until_stopped

# Rank 0's interpreter goes with its lock held from after the last handler at exit on, so that a thread which lets go of
# a tensor then is stopped at the lock, and the process aborts. Rank 1 ends once rank 0's own handlers have run.
ENDS = """
import atexit, ctypes, os, sys
reading, writing = os.pipe()
rank = 0 if os.fork() else 1
if rank == 0:
    atexit.register(ctypes.PyDLL(None).usleep, 1_500_000)
    atexit.register(os.close, writing)
else:
    os.close(writing)
import torch, torch.distributed as dist, torch_lowcomm as lc
options = lc.Options("p2p=minmax8:bucket=1024", min_bytes=0)
dist.init_process_group("lowcomm", init_method="file://" + sys.argv[1], rank=rank, world_size=2, pg_options=options)
if rank == 0:
    dist.irecv(torch.zeros(10), 1).get_future()
else:
    os.read(reading, 1)
    os._exit(0)
"""


# Rank 0 ends when its last send, and a broadcast of its own, have returned.
SENDS = """
import os, sys
rank = 0 if os.fork() else 1
import torch, torch.distributed as dist, torch_lowcomm as lc
dist.init_process_group("lowcomm", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
for n in (1, 1000, 65_536, 10):
    for i in range(20):
        x = torch.full((n,), float(i))
        if rank == 0:
            dist.send(x, 1, tag=i % 3)
        else:
            got = torch.zeros(n)
            dist.recv(got, 0, tag=i % 3)
            assert torch.equal(got, x), (n, i)
x = torch.full((100_000,), float(rank))
dist.broadcast(x, 0)
assert torch.equal(x, torch.zeros(100_000))
if rank == 1:
    print("all have come", flush=True)
    os._exit(0)
if sys.argv[2] == "destroys":
    dist.destroy_process_group()
os.wait()
"""


@pytest.mark.parametrize("how", ["destroys", "ends"])
def test_after_small_sends(tmp_path, how):
    source = SENDS if how == "destroys" else SENDS.replace("os.wait()\n", "")
    ended = ranks.run_command([sys.executable, "-c", source, tmp_path / "store", how], deadline_s=100)
    assert ended.code == 0 and "all have come" in ended.out, ended.text


def _sends_to_a_stopped_rank(r):
    r.init("lowcomm", timeout_s=2)
    if r.rank == 1:
        dist.irecv(torch.zeros(10), 0)
        dist.recv(torch.zeros(10), 0, tag=2)  # rank 0 knows of both receives
        r.say("posted", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.send(torch.ones(10), 1, tag=2)
    wait_until_stopped(r.hear("posted"))
    dist.send(torch.ones(10), 1)
    dist.destroy_process_group()


def test_with_a_small_send_that_does_not_arrive():
    """The group's end says who has not received it, and is not put off for ever."""
    outputs = []
    ranks.run_ranks(_sends_to_a_stopped_rank, 2, timeout=60, kill_last=[1], outputs=outputs)
    assert (
        "ends on rank 0 (global 0), and the last frames to rank 1 (global 1) have not arrived within 2000 ms"
        in outputs[0]
    )


@pytest.mark.later
def test_with_a_receive_under_way(tmp_path):
    ended = ranks.run_command([sys.executable, "-c", ENDS, tmp_path / "store"], deadline_s=150)
    assert ended.code == 0, ended.text
