"""Inputs that torch computes with in a way of its own: expanded, of inference mode, sparse with empty blocks."""

import pytest
import torch
import torch.distributed as dist


def test_a_root_broadcasts_an_expanded_tensor(r):
    r.init("lowcomm")
    tensor = torch.full((1,), 3.0).expand(4) if r.rank == 0 else torch.zeros(4)
    dist.broadcast(tensor, 0)
    assert torch.equal(tensor, torch.full((4,), 3.0))
    if r.rank == 1:  # a mistake that is found before anything is sent
        with pytest.raises(ValueError, match="share memory"):
            dist.broadcast(torch.zeros(1).expand(4), 0)


def test_a_list_is_reduced_in_inference_mode(r):
    r.init("lowcomm")
    with torch.inference_mode():
        tensors = [torch.full((3,), float(r.rank + 1)), torch.full((3,), 10.0)]
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce(tensors).wait()
    assert all(torch.equal(one, torch.full((3,), 23.0)) for one in tensors)


def test_sparse_tensors_of_empty_blocks_and_of_halves(r):
    r.init("lowcomm")
    indices = torch.tensor([[r.rank, 3]])
    empty = torch.sparse_coo_tensor(indices, torch.empty(2, 0), (5, 0))
    dist.all_reduce(empty)
    assert empty.shape == (5, 0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64):
        tensor = torch.sparse_coo_tensor(indices, torch.tensor([1, 2], dtype=dtype), (5,))
        dist.all_reduce(tensor)
        assert torch.equal(tensor.to_dense(), torch.tensor([1, 1, 0, 4, 0], dtype=dtype)), dtype
