"""lc.DiLoCoX over two clusters of two ranks that share one model by FSDP2 or HSDP: what is evaluated, and what is resumed."""

import diloco_model
import fsdp_model
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc

EVERY, STEPS = 3, 8
CODED = {"codec": "sym4:bucket=64", "rank": 4}


def _make(how, options):
    """(model, optimizer): two clusters of two ranks, of which one holds what the other's at its place holds."""
    torch.manual_seed(7)
    model = fsdp_model.make_model()
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("clusters", "shards"))
        over, parts = {"mesh": mesh}, mesh["shards"]
    else:  # replicas inside a cluster, each of which averages next to the other
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("clusters", "replicas", "shards"))
        over, parts = {"group": mesh.get_group("clusters")}, mesh["replicas", "shards"]
    for block in model:
        fully_shard(block, mesh=parts)
    fully_shard(model, mesh=parts)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, lc.DiLoCoX(inner, EVERY, model=model, **over, **options)


@pytest.mark.on("quad", group={})
def test_evaluations_compute_with_the_parameters_of_the_moment(r):
    """Those of training, the outer ones, again those of training, restored ones, those at the end."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("clusters", "shards"))
    torch.manual_seed(7)
    model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh["shards"])  # a root's weight stays after a forward
    x, inner = torch.eye(8), torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(x)
    optimizer = lc.DiLoCoX(inner, EVERY, model=model, mesh=mesh, codec=None)
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(10 * (r.rank // 2) + step)
        model(torch.randn(8, 8, generator=draws)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    computed, held = [], []

    def evaluate():
        with torch.no_grad():
            computed.append(model(x))
        model.reshard()
        held.append((x @ model.weight.full_tensor().T + model.bias.full_tensor()).detach())
        with torch.no_grad():
            model(x)  # gathered again, as after any evaluation

    evaluate()
    with optimizer.outer_parameters():
        evaluate()
    evaluate()
    optimizer.restore()
    evaluate()
    optimizer.finish()
    evaluate()
    own, outer, again, restored, _ = held
    assert torch.equal(own, again) and not torch.equal(own, outer) and torch.equal(outer, restored)
    torch.testing.assert_close(computed, held)


@pytest.mark.later
@pytest.mark.parametrize("how", ["fsdp2", "hsdp"])
@pytest.mark.on("quad", group={})
def test_shards_are_resumed(r, how):
    """Shards saved while averages are under way, into one distributed checkpoint, and resumed."""
    model, optimizer = _make(how, CODED)
    fsdp_model.steps(r, model, optimizer, range(STEPS))
    cluster = f"model{r.rank // 2}"
    weights, loop = get_state_dict(model, optimizer)
    dcp.save({"loop": loop, cluster: weights}, checkpoint_id=r.path("dcp"))
    fsdp_model.steps(r, model, optimizer, range(STEPS, 2 * STEPS))
    optimizer.finish()
    whole = fsdp_model.whole(model)
    dist.destroy_process_group()

    r.init()
    model, optimizer = _make(how, CODED)
    weights, loop = get_state_dict(model, optimizer)
    saved = {"loop": loop, cluster: weights}
    dcp.load(saved, checkpoint_id=r.path("dcp"))
    set_state_dict(model, optimizer, model_state_dict=saved[cluster], optim_state_dict=saved["loop"])
    fsdp_model.steps(r, model, optimizer, range(STEPS, 2 * STEPS))
    optimizer.finish()
    assert not diloco_model.differing(fsdp_model.whole(model), whole)
