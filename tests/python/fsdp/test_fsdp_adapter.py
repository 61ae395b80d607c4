"""The assumptions of torch_lowcomm.fsdp._torch_2_11 about FSDP2's private parts, against FSDP2 itself."""

import pytest
import torch
import torch.distributed as dist
from fsdp_model import batch, loss_of, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from torch_lowcomm._torch_names import all_gather_single, reduce_scatter_single
from torch_lowcomm.fsdp import _torch_2_11 as fsdp2


class _Allocates:
    def allocate(self, size, *, dtype, device):
        return fsdp2.new_buffer(size, dtype, device)


@pytest.mark.on("pair", "quad")
def test_the_adapter_describes_what_fsdp2_does(r):
    r.init("lowcomm")
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
    model[1].big.weight.requires_grad_(False)
    groups = list(fsdp2.parameter_groups(model))
    assert [g.module for g in groups] == [model[0], model[1]]
    for g in groups:
        assert not g.has_replicas
        assert g.reduced_order() == list(range(len(g.parameters)))  # of gradients of one dtype
        for p, shard in zip(g.parameters, g.live_shards(), strict=True):
            assert shard.shape == (p.shard_numel,), p.names
            assert shard.untyped_storage().data_ptr() == p.parameter.to_local().untyped_storage().data_ptr(), p.names
    gathered, reduced = [], []

    class Gather(_Allocates, fsdp2.AllGather):
        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            gathered.append((input_tensor.clone(), group.group_name))
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)

    class Reduce(_Allocates, fsdp2.ReduceScatter):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            reduced.append((output_tensor.numel(), group.group_name))
            return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    for g in groups:
        assert not g.uses_custom_comm(Gather)
        g.module.set_custom_all_gather(Gather())
        g.module.set_custom_reduce_scatter(Reduce())
        assert g.uses_custom_comm(Gather)
        assert g.uses_custom_comm(Reduce)
        assert g.group.group_name == dist.group.WORLD.group_name
    loss_of(model, batch(r.rank, 0)).backward()

    # The flat buffer is the shards in the order the adapter names them, each padded to its shard_numel.
    for g, (flat, group) in zip(groups, gathered, strict=False):
        assert group == g.group.group_name
        assert flat.numel() == sum(p.shard_numel for p in g.parameters)
        at = 0
        for p in g.parameters:
            local = p.parameter.to_local().detach().flatten()
            assert torch.equal(flat[at : at + local.numel()], local), p.names
            assert flat.dtype == p.gathered_dtype, p.names
            assert dict(model.named_parameters())[p.names[0]] is p.parameter
            at += p.shard_numel
    # Backward comes by the last group first; only what is trained is reduced.
    sizes = [
        sum(p.shard_numel for p, trained in zip(g.parameters, g.trained(), strict=True) if trained) for g in groups
    ]
    assert [size for size, _ in reduced] == sizes[::-1]
    assert sum(map(len, (g.parameters for g in groups))) - sum(map(sum, (g.trained() for g in groups))) == 1


def test_what_overlap_relies_on(r):
    """Overlap relies on this: when FSDP2 waits for a gather's Work, and that it only stores a reduction's output."""
    r.init("lowcomm")
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
    groups, waited, broken = list(fsdp2.parameter_groups(model)), [], []

    class Work(dist.Work):
        def __init__(self, work):
            super().__init__()
            self.work = work

        def wait(self, timeout=None):
            waited.append(self)
            return self.work.wait()

    class Gather(_Allocates, fsdp2.AllGather):
        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            assert not async_op
            return Work(all_gather_single(output_tensor, input_tensor, group=group, async_op=True))

    class Reduce(_Allocates, fsdp2.ReduceScatter):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            assert fsdp2.in_backward()
            assert self.group.only_stores_reduced(output_tensor.dtype)
            assert not self.group.only_stores_reduced(torch.float16)
            before = self.group.take_gradients()
            assert [p for p, _ in before] == self.group.live_parameters()
            output_tensor.fill_(float("nan"))
            fsdp2.at_end_of_backward(lambda: output_tensor.fill_(3.0), lambda: broken.append(self.group))

    for g in groups:
        assert g.device.type == "cpu"
        g.module.set_custom_all_gather(Gather())
        comm = Reduce()
        comm.group = g
        g.module.set_custom_reduce_scatter(comm)
    with torch.no_grad():
        model(batch(r.rank, 0))
    assert len(waited) == 2
    assert groups[0].prefetch()
    assert not groups[0].prefetch()
    assert len(waited) == 2
    groups[0].drop_prefetched()
    assert len(waited) == 3
    loss = loss_of(model, batch(r.rank, 0))
    assert len(waited) == 5
    assert not fsdp2.in_backward()
    loss.backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad.to_local(), torch.full_like(p.grad.to_local(), 3.0)), name
    assert not broken
    p = next(model.parameters())
    p.register_post_accumulate_grad_hook(lambda _: None)
    assert not groups[0].only_stores_reduced(torch.float32)


@pytest.mark.on("quad")
def test_replicas_are_summed_after_the_reduction(r):
    r.init("lowcomm")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_model(mesh=mesh)
    loss_of(model, batch(r.rank, 0)).backward()
    for g in fsdp2.parameter_groups(model):
        assert not g.only_stores_reduced(torch.float32)


class _Sum(torch.nn.Module):
    """A value for each parameter, by which its whole gradient is told: 1 for the first, 2 for the second, and on."""

    def __init__(self, sizes):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(size) for size in sizes])

    def forward(self):
        return sum((i + 1) * part.sum() for i, part in enumerate(self.parts))


@pytest.mark.skipif(
    not hasattr(FSDPParamGroup, "_init_reduce_scatter_param_order"), reason="this torch mixes no dtypes"
)
def test_gradients_of_one_dtype_lie_side_by_side(r):
    """Gradients of several dtypes: in which order they lie in the flat buffer, and that FSDP2 casts some of it."""
    r.init("lowcomm")
    sizes = [4 * r.size, 2 * r.size, 6 * r.size]
    model = _Sum(sizes)
    model.parts[1].grad_dtype = torch.bfloat16
    fully_shard(model, mesh=init_device_mesh("cpu", (r.size,)))
    (group,) = fsdp2.parameter_groups(model)
    reduced = []

    class Reduce(_Allocates, fsdp2.ReduceScatter):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)
            reduced.append(output_tensor.clone())

    group.module.set_custom_reduce_scatter(Reduce())
    model().backward()
    (flat,) = reduced
    assert group.reduced_order() == [0, 2, 1]
    assert flat.tolist() == [float(i + 1) for i in group.reduced_order() for _ in range(sizes[i] // r.size)]
    assert not group.only_stores_reduced(flat.dtype)
    assert [p.grad.dtype for p in model.parts] == [torch.float32, torch.bfloat16, torch.float32]
