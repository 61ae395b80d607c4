"""CUDA tensors over a host link by their codes only: two ranks on one GPU, beside the same ops on host tensors."""

import pytest
import ranks
import torch
import torch.distributed as dist
from collective_cases import values
from compressed_by_hand import options

from torch_lowcomm import _build_info

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather")
# Without draws: an op draws by its number, and those on the host have others.
SPECS = ("sym4:bucket=1024", "minmax8:bucket=64", "gauss4", "fp8e4m3", "topk:keep=0.1", "sym8:bucket=tensor")


def on_a_gpu(test):
    test = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test)
    test = pytest.mark.skipif(not _build_info.CUDA_ARCHITECTURES, reason="no CUDA kernels in this build")(test)
    return pytest.mark.cuda(test)


def _results(r, n, dtype, device):
    """What every op gives on this rank, of the same elements wherever they are."""
    x = values(dtype, n * r.size, n, r.rank).to(device)
    part = x[:n].clone()
    out = {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("average", dist.ReduceOp.AVG)):
        out[f"all_reduce {name}"] = part.clone()
        dist.all_reduce(out[f"all_reduce {name}"], op=op)
        out[f"reduce_scatter {name}"] = torch.empty_like(part)
        dist.reduce_scatter_tensor(out[f"reduce_scatter {name}"], x, op=op)
    out["all_gather"] = torch.empty_like(x)
    dist.all_gather_into_tensor(out["all_gather"], part)
    out["all_gather in place"] = x.clone()
    own = out["all_gather in place"][r.rank * n : (r.rank + 1) * n]
    dist.all_gather_into_tensor(out["all_gather in place"], own)
    out["all_to_all"] = torch.empty_like(x)
    dist.all_to_all_single(out["all_to_all"], x)
    out["broadcast"] = part.clone()
    dist.broadcast(out["broadcast"], src=1)
    gathered = [torch.empty_like(part) for _ in range(r.size)] if r.rank == 0 else None
    dist.gather(part, gathered, dst=0)
    if gathered:
        out["gather"] = torch.cat(gathered)
    return {name: t.cpu() for name, t in out.items()}


def _stats(op):
    import torch_lowcomm as lc

    return lc.stats()[dist.group.WORLD.group_name][op]


def _equals_the_host(r, spec):
    torch.cuda.set_device(0)
    wrong = []
    for staged in (True, False):
        r.init("lowcomm", pg_options=options("; ".join(f"{op}={spec}" for op in OPS), staged=staged))
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for n in (512, 5000, 130_001):
                there, here = _results(r, n, dtype, "cuda"), _results(r, n, dtype, "cpu")
                wrong += [f"{name} {dtype} n={n} staged={staged}" for name in here if not here[name].equal(there[name])]
        for op in OPS:
            stats = _stats(op)
            assert (stats["staged_calls"] > 0) == staged, (op, stats)
            assert stats["unstaged_because"].keys() == (set() if staged else {"staged=False"}), (op, stats)
    assert not wrong, "\n".join(wrong)


@on_a_gpu
@pytest.mark.parametrize("spec", SPECS)
def test_ops_of_cuda_tensors_equal_those_of_host_tensors(spec):
    ranks.run_ranks(_equals_the_host, 2, spec, start="spawn", timeout=300)


def _only_codes(r):
    spec = "sym4:bucket=1024"
    torch.cuda.set_device(0)
    r.init("lowcomm", pg_options=options(f"all_reduce={spec}; all_gather={spec}; reduce_scatter={spec}"))
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
    ranks.run_ranks(_only_codes, 2, start="spawn", timeout=120)


def _refuses(r):
    torch.cuda.set_device(0)
    r.init("lowcomm", pg_options=options("all_reduce=sym4; all_gather=sym4"))
    n = 300_000
    for at in (3, n - 1):
        texts = []
        for device in ("cuda", "cpu"):
            x = torch.ones(n, device=device)
            if r.rank == 1:
                x[at] = float("nan")
            with pytest.raises(ValueError if r.rank == 1 else dist.DistBackendError) as told:
                dist.all_gather_into_tensor(torch.empty(n * r.size, device=device), x)
            texts.append(str(told.value).split(" [op")[0])
        assert texts[0] == texts[1], texts
        assert "nan" in texts[0], texts
    dist.all_reduce(torch.ones(n, device="cuda"))


@on_a_gpu
def test_a_nan_is_told_as_on_the_host():
    ranks.run_ranks(_refuses, 2, start="spawn", timeout=120)


def _on_the_host(r):
    """Nothing of it shows where tensors are on the host."""
    import torch_lowcomm as lc

    r.init("lowcomm", pg_options=options("all_reduce=sym4"))
    dist.all_reduce(torch.ones(5000))
    stats = _stats("all_reduce")
    assert stats["staged_calls"] == stats["device_to_host_bytes"] == stats["host_to_device_bytes"] == 0, stats
    assert stats["unstaged_because"] == {}, stats
    assert lc.Options(staged=False).staged is False
    assert lc.Options().staged is None
    assert "staged=False" in repr(lc.Options(staged=False))


def test_host_tensors_have_no_part_in_it(pair):
    pair(_on_the_host)
