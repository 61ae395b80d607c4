"""A rank with a GPU and NCCL beside one without: their exact ops meet, through host memory.

The ops are those for which lowcomm makes the copies: gloo's own ops of CUDA tensors need a torch with CUDA."""

import logging

import fake_cuda
import ranks
import torch
import torch.distributed as dist

pytestmark = fake_cuda.needed


def _mixed(r):
    from torch_lowcomm import _create

    fake_cuda.begin()
    _create._has_nccl = lambda: r.rank == 0
    _create.make_nccl = _makes_nccl
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("torch_lowcomm").addHandler(handler)
    r.init("lowcomm")
    x = torch.full((5,), 1.0 + r.rank).to("cuda" if r.rank == 0 else "cpu")
    for sender in (0, 1):
        (dist.send if r.rank == sender else dist.recv)(x, 1 - r.rank)
        assert x.cpu().tolist() == [1.0] * 5
    dist.all_reduce_coalesced([x])
    assert x.cpu().tolist() == [2.0] * 5
    warned = [text for text in told if "rank 1 has no NCCL or no GPU" in text]
    assert len(warned) == (r.rank == 0), told
    dist.destroy_process_group()


def _makes_nccl(*_):
    raise AssertionError("a process group of NCCL was made")


def test_exact_ops_of_a_gpu_and_a_cpu():
    ranks.run_ranks(_mixed, 2, start="spawn", env=fake_cuda.ENV)
