"""FSDP2 and DDP inside a stage: the gradients of the whole batch on the whole model, and a step after one that failed."""

import pytest
import stages_case as case
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc

SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B +2": lambda *a, **k: lc.pipeline.Schedule1F1B(*a, ahead=2, **k),
}


class _Spoilt(nn.Module):
    """Layers that meet others in a micro-batch of one step; the activation of stage 0 has a NaN in it."""

    def __init__(self, layers, index):
        super().__init__()
        self.layers, self.index = layers, index
        self.left, self.meet = -1, None  # micro-batches until then, and how

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            self.meet()
        return case.Spoil.apply(self.layers(x), self.left == 0 and self.index == 0, False)


def _wrapped(module, how, mesh):
    if how == "DDP":
        # Where several forwards precede the first backward, torch's DDP fails in its second step without this, under torch's own
        # stages too (it counts each parameter twice as it orders its buckets).
        return DistributedDataParallel(module, process_group=mesh.get_group("replica"), find_unused_parameters=True)
    for layer in module.layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["replica"])
    return fully_shard(module, mesh=mesh["replica"])


class _Replica:
    """This rank's stage of one of two replicas, each with half of the samples."""

    def __init__(self, how, name, **options):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
        self.replica, self.index = self.mesh.get_local_rank("replica"), self.mesh.get_local_rank("stage")
        self.spoilt = _Spoilt(case.module(self.index), self.index)
        self.module = _wrapped(self.spoilt, how, self.mesh)
        self.stage = lc.pipeline.Stage(
            self.module, self.index, 2, torch.device("cpu"), group=self.mesh.get_group("stage"), **options
        )
        self.name = name
        self.renew()
        self.x, self.y = case.batch(self.replica * case.ROWS)
        self.samples = range(self.replica * case.ROWS, (self.replica + 1) * case.ROWS)

    def renew(self):
        self.schedule = SCHEDULES[self.name](self.stage, case.MICRO, loss_fn=case.loss)

    def step(self):
        samples = {} if self.stage.cache is None else {"samples": self.samples}
        lc.pipeline.step(self.schedule, self.x, target=self.y, **samples)
        found = [_whole(p.grad) for p in self.module.parameters()]
        self.module.zero_grad()
        return found


def _whole(gradient):
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()


@pytest.mark.later
@pytest.mark.parametrize(("how", "name"), [("FSDP2", "1F1B +2"), ("DDP", "GPipe")])
@pytest.mark.on("quad", group={})
def test_exact_stages_have_the_whole_models_gradients(r, how, name):
    replica = _Replica(how, name)
    model = case.whole(2)
    x, y = case.batch(rows=2 * case.ROWS)
    case.loss(model(x), y).backward()
    want = [p.grad for p in model[replica.index].parameters()]
    for _ in range(2):
        for mine, whole in zip(replica.step(), want, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.later
@pytest.mark.parametrize(("how", "name"), [("FSDP2", "GPipe"), ("DDP", "1F1B +2")])
@pytest.mark.on("quad", group={"timeout_s": 300})
def test_sharded_stages_go_on_after_a_failure(r, how, name):
    """The steps after a reset have the bits of a run in which nothing failed."""
    undisturbed = _Replica(how, name, cache=lc.pipeline.Cache(), **case.CODED)
    undisturbed.step()
    want = undisturbed.step()
    dist.barrier()
    cache = lc.pipeline.Cache()
    replica = _Replica(how, name, cache=cache, **case.CODED)
    replica.step()

    def meet():
        """Stage 0 fails once both ranks of stage 1 compute: FSDP2 waits for ever where one of them alone fails before that."""
        if replica.index == 1:
            r.say(f"computes {replica.replica}")
        else:
            for i in range(2):
                r.hear(f"computes {i}")

    replica.spoilt.left, replica.spoilt.meet = 2 - replica.index, meet
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)nan"):
        replica.step()
        replica.step()  # a rank whose part is over hears of it in its next step
    replica.module.zero_grad()
    lc.pipeline.reset(replica.schedule)
    if how == "FSDP2":
        replica.renew()
    rows = case.gathered(cache.slots.rows(0, replica.index == 0).tolist())
    first = 2 * replica.replica
    assert rows[first] == rows[first + 1]
    got = replica.step()
    if sum(row[2] for row in rows[first]) == case.ROWS:  # what one side alone had committed is a first visit again
        assert all(map(torch.equal, got, want))
    else:
        for mine, whole in zip(got, want, strict=True):
            torch.testing.assert_close(mine, whole, rtol=0.2, atol=0.02)
