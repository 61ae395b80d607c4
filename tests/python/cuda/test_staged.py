"""CUDA tensors over a host link by their codes only. Their values are a stage of `make gpu-check` (gpu_check/)."""

import torch
import torch.distributed as dist
from compressed_by_hand import options

import torch_lowcomm as lc


def test_host_tensors_have_no_part_in_it(r):
    """Nothing of it shows where tensors are on the host."""
    r.init("lowcomm", pg_options=options("all_reduce=sym4"))
    dist.all_reduce(torch.ones(5000))
    stats = lc.stats()[dist.group.WORLD.group_name]["all_reduce"]
    assert stats["staged_calls"] == stats["device_to_host_bytes"] == stats["host_to_device_bytes"] == 0, stats
    assert stats["unstaged_because"] == {}, stats
    assert lc.Options(encode_on_device=False).encode_on_device is False
    assert lc.Options().encode_on_device is None
    assert "encode_on_device=False" in repr(lc.Options(encode_on_device=False))
