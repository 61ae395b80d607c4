"""CUDA tensors over a host link by their codes only. Their values are a stage of `make gpu-check` (gpu_check/)."""

import ranks
import torch
import torch.distributed as dist
from compressed_by_hand import options
from gpu_check.check import ON_ONE_GPU
from gpu_check.marks import on_a_gpu


def _stats(op):
    import torch_lowcomm as lc

    return lc.stats()[dist.group.WORLD.group_name][op]


def _only_codes(r):
    spec = "sym4:bucket=1024"
    torch.cuda.set_device(0)
    r.init(pg_options=options(f"all_reduce={spec}; all_gather={spec}; reduce_scatter={spec}"))
    n = 1 << 20
    x = torch.randn(n * r.size, device="cuda")
    part = x[:n].clone()
    dist.all_gather_into_tensor(torch.empty_like(x), part)
    dist.reduce_scatter_tensor(torch.empty_like(part), x)
    dist.all_reduce(part)
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        stats = _stats(op)
        # Of two ranks what one sends is what it copies from the device, and what it gets is as much: without the
        # headers of frames.
        assert stats["wire_bytes"] * 0.99 < stats["device_to_host_bytes"] < stats["wire_bytes"], (op, stats)
        assert stats["host_to_device_bytes"] == stats["device_to_host_bytes"], (op, stats)


@on_a_gpu
def test_only_codes_are_copied():
    ranks.run_ranks(_only_codes, 2, start="spawn", timeout=120, env=ON_ONE_GPU)


def _on_the_host(r):
    """Nothing of it shows where tensors are on the host."""
    import torch_lowcomm as lc

    r.init("lowcomm", pg_options=options("all_reduce=sym4"))
    dist.all_reduce(torch.ones(5000))
    stats = _stats("all_reduce")
    assert stats["staged_calls"] == stats["device_to_host_bytes"] == stats["host_to_device_bytes"] == 0, stats
    assert stats["unstaged_because"] == {}, stats
    assert lc.Options(encode_on_device=False).encode_on_device is False
    assert lc.Options().encode_on_device is None
    assert "encode_on_device=False" in repr(lc.Options(encode_on_device=False))


def test_host_tensors_have_no_part_in_it(pair):
    pair(_on_the_host)
