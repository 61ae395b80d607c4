"""Two stages of a constrained decoder on two ranks each: FSDP2 and DDP inside a stage, and replicas of the pipeline."""

import pytest
import subspace_case as case
import test_subspace_pipeline as pipelines
import torch
import torch.distributed as dist
from subspace_adam_model import project_gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc
from torch_lowcomm.subspace.weights import constrained_weights

LAYERS, MICRO, STEPS, LR, CLIP = 4, pipelines.MICRO, 6, 1e-2, 0.1


def _sharded(module, mesh):
    for _, block in module.subspace_parts.blocks_of(module):
        fully_shard(block, mesh=mesh["replica"])
    return fully_shard(module, mesh=mesh["replica"])


def _replicated(module, mesh):
    # As in the tests of lc.pipeline: torch's DDP fails in its second step without this where forwards precede a backward.
    return DistributedDataParallel(module, process_group=mesh.get_group("replica"), find_unused_parameters=True)


def _plain(module, *_):
    return module


INSIDE = {"FSDP2": _sharded, "DDP": _replicated}


class _Run:
    """This rank's stage of one of two replicas, each with half of a batch."""

    def __init__(self, r, wrap, *, dtype=torch.float64, change=_plain):
        r.init("lowcomm")
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
        self.replica, index = self.mesh.get_local_rank("replica"), self.mesh.get_local_rank("stage")
        self.stages = self.mesh.get_group("stage")
        model = change(lc.subspace.constrain(case.gpt(dtype, layers=LAYERS), case.RANK))
        self.part = lc.subspace.cut(model, index, 2)
        self.module = wrap(self.part, self.mesh)
        self.stage = lc.pipeline.Stage(self.module, index, 2, torch.device("cpu"), group=self.stages)
        self.schedule = Schedule1F1B(self.stage, MICRO, loss_fn=case.loss)

    def backward(self, step):
        x, y = (half.chunk(2)[self.replica] for half in _batch(step))
        lc.pipeline.step(self.schedule, x, target=y, ids=x)


def _batch(step):
    return pipelines._batch(step, 4 * MICRO)


def _whole():
    return lc.subspace.constrain(case.gpt(layers=LAYERS), case.RANK)


def _backward(model, step):
    x, y = _batch(step)
    for part, target in zip(x.chunk(2 * MICRO), y.chunk(2 * MICRO), strict=True):
        (model(part, target) / (2 * MICRO)).backward()


def _full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _named(module):
    return {name.removeprefix("module."): _full(p.detach()) for name, p in module.named_parameters()}


@pytest.mark.parametrize("how", INSIDE)
@pytest.mark.on("quad", timeout=180)
def test_inside_a_stage(r, how):
    """Training, with clipping, is that of one process on all samples."""
    run = _Run(r, INSIDE[how])
    optimizer = lc.SubspaceAdamW(run.module, lr=LR)
    model, clipped = _whole(), 0
    one = lc.SubspaceAdamW(model, lr=LR)
    for step in range(STEPS):
        run.backward(step)
        _backward(model, step)
        norm = one.clip_grad_norm(CLIP)
        torch.testing.assert_close(optimizer.clip_grad_norm(CLIP, stages=run.stages), norm, rtol=1e-11, atol=0)
        clipped += norm.item() > CLIP
        for other in (optimizer, one):
            other.step()
            other.zero_grad()
    assert clipped == STEPS
    want = dict(model.named_parameters())
    for name, value in _named(run.module).items():
        assert case.apart(value, want[name]) < 1e-9, name
    assert max(optimizer.distances().values()) < 1e-12
    if how == "FSDP2":
        local = [p.to_local().numel() for p in run.module.parameters()]
        assert sum(local) < 0.55 * sum(p.numel() for p in run.module.parameters())
        down = run.part.get_submodule(f"blocks.{run.part.block_numbers[0]}.down").weight
        assert optimizer.state[down]["exp_avg"].shape[0] == case.RANK


def _hooked(module, mesh):
    wrapped = _replicated(module, mesh)
    state = lc.ddp.State(mesh.get_group("replica"), codec="sym4:bucket=64")
    wrapped.register_comm_hook(state, lc.ddp.hook)
    return wrapped


@pytest.mark.parametrize("how", ["ddp", "diloco"])
@pytest.mark.on("quad")
def test_replicas_send_coordinates(r, how):
    """A step's bytes of the average over replicas: of weights, and of their coordinates."""
    found = []
    for change in (_plain, lc.subspace.reparam):
        run = _Run(r, _hooked if how == "ddp" else _plain, dtype=torch.float32, change=change)
        optimizer = lc.SubspaceAdamW(run.module, lr=LR)
        if how == "diloco":
            optimizer = lc.DiLoCoX(optimizer, 1, mesh=run.mesh, mode="sync", codec="sym4:bucket=64")
        for _ in range(2):  # torch's stages and DDP say other things in their first step
            lc.reset_stats()
            run.backward(0)
            optimizer.step()
            optimizer.zero_grad()
        op = "all_reduce" if how == "ddp" else "outer_step"
        (figures,) = [group[op] for group in lc.stats().values() if group.get(op, {}).get("calls")]
        assert figures["relative_error"] > 0.01, "nothing was coded"
        found.append((figures["raw_bytes"], figures["wire_bytes"]))
        constrained = sum(w.parameter.numel() for w in constrained_weights(run.module))
        numbers = sum(p.numel() for p in run.module.parameters())
        found[-1] += (constrained, numbers)
        dist.destroy_process_group()
    (whole, coded, constrained, numbers), (fewer, fewer_coded, coordinates, left) = found
    assert coordinates * case.WIDTH == constrained * case.RANK
    assert left == numbers - constrained + coordinates
    assert whole - fewer == 4 * constrained * (1 - case.RANK / case.WIDTH)
    assert whole - 4 * numbers < 64  # and which parameters DDP has found in use
    # DDP's hook sends small parameters exactly, coordinates among them.
    assert fewer_coded < coded if how == "ddp" else abs(fewer_coded / coded - fewer / whole) < 0.05


def _weights(part):
    """Each weight as the forward pass has it."""
    return {name: m.weight.detach().clone() for name, m in part.named_modules() if hasattr(m, "weight")}


@pytest.mark.on("quad", timeout=120)
def test_averages_of_coordinates(r):
    """Averages of coordinates are the coordinates of averages, of gradients by DDP and of parameters by DiLoCoX."""
    runs = {}
    for change in (_plain, lc.subspace.reparam):
        run = runs[change] = _Run(r, _replicated, change=change)
        run.backward(0)
        dist.destroy_process_group()
    whole, coordinates = (dict(runs[change].module.named_parameters()) for change in runs)
    compared = 0
    for weight in constrained_weights(runs[_plain].module):
        other = coordinates[weight.name.replace(".weight", ".coordinates")]
        assert case.apart(other.grad, weight.coordinates(weight.parameter.grad)) < 1e-12, weight.name
        compared += 1
    assert compared == (5, 2)[run.part.index], "T_S, and two weights of each constrained block"
    for name in set(whole) & set(coordinates):
        assert case.apart(coordinates[name].grad, whole[name].grad) < 1e-11, name

    found = {}
    for change in (_plain, lc.subspace.reparam):
        run = _Run(r, _plain, change=change)
        inner = torch.optim.SGD(run.module.parameters(), lr=0.3)
        optimizer = lc.DiLoCoX(inner, 2, mesh=run.mesh, mode="sync", codec=None)
        before = _weights(run.part)
        for step in range(4):
            run.backward(step)
            project_gradients(run.module)  # of weights; coordinates cannot leave the subspace
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        found[change] = _weights(run.part)
        dist.destroy_process_group()
    for name, value in found[lc.subspace.reparam].items():
        off = case.apart(value, found[_plain][name])
        assert off < 1e-6, (name, off)  # pseudo-gradients travel in float32
        assert case.apart(value, before[name]) > 1e-4, name
