"""Two replicas of a pipeline of two stages: activations, gradients and what the replicas average, all of it coded."""

import pytest
import stages_case as case
import torch
from torch.distributed.device_mesh import init_device_mesh

import torch_lowcomm as lc

EPOCHS, WARM, EVERY = 6, 3, 4
CODED = {"forward": "sym3:bucket=512", "backward": "sym6:bucket=512", "first_visit": "minmax8:bucket=128"}


def _quantized(parameters, mesh):
    return lc.QuantizedAdam(parameters, lr=3e-3, warmup_steps=WARM, group=mesh.get_group("replica"))


def _diloco(parameters, mesh):
    return lc.DiLoCoX(torch.optim.AdamW(parameters, lr=3e-3), EVERY, mesh=mesh, mode="sync", codec="sym4:bucket=128")


def _trained(r, name, optimizer_of, coded):
    """(loss of each step of the last stage, parameters at the end, bytes)."""
    r.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, index = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
    options = {"cache": lc.pipeline.Cache(), **CODED} if coded else {}
    schedule, (stage,) = case.build(index, 2, name, group=mesh.get_group("stage"), **options)
    optimizer = optimizer_of(stage.submod.parameters(), mesh)
    losses, steps = [], 0
    for samples, x, y in lc.pipeline.batches(
        case.data(), batch=case.ROWS, seed=1, epochs=EPOCHS, replica=replica, replicas=2
    ):
        found = []
        numbers = {"samples": samples} if coded else {}
        lc.pipeline.step(schedule, x, target=y, losses=found, **numbers)
        optimizer.step()
        optimizer.zero_grad()
        losses += [torch.stack(found).mean().item()] if found else []
        steps += 1
        if steps == 1:
            lc.reset_stats()  # torch's stages exchange their tensors' shapes in the first step
    if isinstance(optimizer, lc.DiLoCoX):
        optimizer.finish()
    ops = {}
    for group in lc.stats().values():
        for op, figures in group.items():
            op = op.split()[0]  # messages are counted by boundary and direction
            calls, exact, sent = ops.get(op, (0, 0, 0))
            ops[op] = (calls + figures["calls"], exact + figures["exact_calls"], sent + (figures["wire_bytes"] or 0))
    weights = [p.detach().clone() for p in stage.submod.parameters()]
    return losses, weights, ops, steps


@pytest.mark.later
@pytest.mark.parametrize(("name", "optimizer_of"), [("GPipe", _quantized), ("1F1B", _diloco)])
def test_replicas_of_a_pipeline(quad, name, optimizer_of):
    exact, found = quad(_trained, name, optimizer_of, False), quad(_trained, name, optimizer_of, True)
    for stage in (0, 1):
        for mine, other in zip(found[stage][1], found[2 + stage][1], strict=True):
            assert torch.equal(mine, other), "replicas differ"
    assert not torch.equal(found[0][1][0], case.module(0)[0].weight), "nothing was trained"
    for replica in (0, 2):  # by the last stage
        coded, uncoded = (sum(run[replica + 1][0][-4:]) / 4 for run in (found, exact))
        assert coded / uncoded < 1.01, (coded, uncoded)
        assert uncoded < exact[replica + 1][0][0]
    op = "quantized_adam" if optimizer_of is _quantized else "outer_step"
    for *_, ops, steps in found:  # no activation, gradient or average is exact
        for direction in ("send", "recv"):
            assert ops[direction][:2] == ((steps - 1) * case.MICRO, 0)
        assert ops[op][:2] == (steps - WARM if optimizer_of is _quantized else steps // EVERY, 0)
        assert ops["send"][2] > 0 and ops[op][2] > 0
        warm = {"quantized_adam_warmup"} if optimizer_of is _quantized else set()
        # The ranks of a site also tell one another how an outer step came out, in a few bytes.
        called = {name for name, (calls, *_) in ops.items() if calls and not name.startswith("DiLoCoX")}
        assert called == {"send", "recv", op, *warm}
        assert not warm or ops["quantized_adam_warmup"][:2] == (WARM - 1, WARM - 1)
