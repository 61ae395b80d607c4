"""A process that ends with a receive that no message ever matches: nothing of it is left to Python's finalization."""

import sys

import pytest
import ranks

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


@pytest.mark.later
def test_with_a_receive_under_way(tmp_path):
    ended = ranks.run_command([sys.executable, "-c", ENDS, tmp_path / "store"], deadline_s=150)
    assert ended.code == 0, ended.text
