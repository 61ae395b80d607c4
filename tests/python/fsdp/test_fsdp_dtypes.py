"""Parameters of several dtypes and tensor subclasses under lc.fsdp.quantize: coded where possible, else exact and counted."""

import pytest
import torch
import torch.distributed as dist
from collective_cases import bits
from fsdp_model import gathered
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc
from torch_lowcomm._compatibility import minor

SPEC = "minmax4:bucket=128"


class _Adapted(nn.Module):
    """A frozen bf16 matrix, and what is trained next to it in fp32: a norm, and matrices too small to be coded."""

    def __init__(self, width=64, rank=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.base = nn.Linear(width, width, bias=False).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.on("pair", "quad")
def test_one_coded_dtype_among_several_is_coded(r, overlap):
    r.init("lowcomm")
    torch.manual_seed(2)
    model = fully_shard(_Adapted(), mesh=init_device_mesh("cpu", (r.size,)))
    before = {name: p.full_tensor() for name, p in model.named_parameters()}
    base = list(model.base.weight.full_tensor().chunk(r.size))
    lc.fsdp.quantize(model, weights=SPEC, gradients="none", overlap=overlap)
    lc.reset_stats()
    seen = gathered(model)
    for name, want in before.items():
        if name == "base.weight":
            want = torch.cat([lc.codec(SPEC).roundtrip(part.contiguous()) for part in base])
            assert want.dtype == torch.bfloat16
            assert not torch.equal(want, before[name])
        assert torch.equal(bits(seen[name]), bits(want)), name
    model(torch.randn(3, 64)).square().mean().backward()
    stats = lc.stats()[dist.group.WORLD.group_name]["all_gather"]
    assert stats["exact_calls"] == 0, stats
    assert stats["wire_bytes"] < 0.7 * stats["raw_bytes"], stats
    assert model.up.weight.grad is not None


class _Odd(nn.Module):
    """Bytes that are no whole elements of the coded dtype: three int8 a rank."""

    def __init__(self, size):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(64, 64))
        self.steps = nn.Parameter(torch.arange(3 * size, dtype=torch.int8), requires_grad=False)


class _Scaled(torch.Tensor):
    """A subclass that gathers its elements in bf16, for itself."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data):
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inner(x):
            return x._data if isinstance(x, cls) else x

        args, kwargs = torch.utils._pytree.tree_map(inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        views = {torch.ops.aten.split, torch.ops.aten.new_zeros, torch.ops.aten.slice, torch.ops.aten.copy_}
        views |= {torch.ops.aten.view, torch.ops.aten.as_strided, torch.ops.aten.detach, torch.ops.aten.clone}
        if func.overloadpacket in views:
            return torch.utils._pytree.tree_map(lambda x: cls(x) if type(x) is torch.Tensor else x, out)
        return out

    def fsdp_pre_all_gather(self, mesh):
        return (self._data.bfloat16(),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (data,) = outputs
        if out is not None:
            return None
        return data.to(param_dtype), outputs


_NO_INTEGERS = pytest.mark.skipif(minor(torch.__version__) < (2, 12), reason="FSDP2 of torch 2.11 shards no integers")


@pytest.mark.parametrize("what", [pytest.param("odd bytes", marks=_NO_INTEGERS), "subclass"])
def test_what_cannot_be_read_as_one_dtype_travels_exact_and_is_counted(r, what):
    r.init("lowcomm")
    torch.manual_seed(2)
    model = _Odd(r.size)
    if what == "subclass":
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        model[0].weight = nn.Parameter(_Scaled(torch.randn(64, 64)))
    model = fully_shard(model, mesh=init_device_mesh("cpu", (r.size,)))
    lc.fsdp.quantize(model, weights=SPEC)
    lc.reset_stats()
    gathered(model)
    stats = lc.stats()[dist.group.WORLD.group_name]["all_gather"]
    assert stats["exact_calls"] == stats["calls"] == 1, stats
    assert stats["exact_because"] == {"its parameters have several dtypes, or gather bytes": 1}, stats
