"""Learned levels through fully_shard (QSDP, Algorithm 2): when they are learned, who has them, what a checkpoint keeps."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from collective_cases import bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_lowcomm as lc

WEIGHTS, GRADIENTS = "levels3:bucket=1024", "levels4:bucket=512"
BIG, SMALL = (512, 256), (64, 256)


class _Two(nn.Module):
    """One tensor of more than 100,000 elements and one of fewer, whose gradients are what they are multiplied with."""

    def __init__(self, big=BIG):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.big = nn.Parameter(torch.randn(big, generator=generator))
        self.small = nn.Parameter(torch.randn(SMALL, generator=generator))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, seed):
        generator = torch.Generator().manual_seed(seed)
        products = [(p * torch.randn(p.shape, generator=generator)).sum() for p in (self.big, self.small, self.bias)]
        return sum(products)


def _make(r, learn_at=(2,), **kwargs):
    model = _Two(**kwargs)
    fully_shard(model, mesh=init_device_mesh("cpu", (r.size,)))
    comms = lc.fsdp.quantize(model, weights=WEIGHTS, gradients=GRADIENTS, learn_at=learn_at)
    return model, comms, torch.optim.SGD(model.parameters(), lr=1e-3)


def _step(r, model, optimizer, step, accumulate=1):
    losses = []
    for k in range(accumulate):
        loss = model(1000 * step + 10 * k + r.rank)
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def _same(a, b):
    return torch.equal(bits(a), bits(b))


def _seen(model, name):
    model.unshard()
    seen = getattr(model, name).detach().clone()
    model.reshard()
    return seen


def _coded_by(shards, spec, table):
    return torch.cat([lc.codec(spec).roundtrip(shard.contiguous(), table=table) for shard in shards])


def _errors(x, size, spec, tables):
    return [(_coded_by(x.chunk(size), spec, table) - x).norm().item() for table in tables]


@pytest.mark.on("pair", "quad", group={}, alike=True)
def test_levels_are_learned_once_at_their_step_and_are_every_ranks(r):
    model, comms, optimizer = _make(r, learn_at=(2,))
    even = torch.arange(8) / 7
    for step in range(4):
        _step(r, model, optimizer, step, accumulate=2)
        # Gathered for the next step already, which learns where it is due; a reduction does in the step's backward.
        big, small = _seen(model, "big"), _seen(model, "small")
        weights, gradients = (comms.state_dict()[f"{what}.0.levels"] for what in ("weights", "gradients"))
        assert (weights["versions"], gradients["versions"]) == ([int(step >= 1)], [int(step >= 2)]), step
        assert list(weights["levels"].shape) == [1, 8]
        assert list(gradients["levels"].shape) == [1, 16]
        table = weights["levels"][0]
        assert _same(table, even) == (step < 1)
        whole = [p.full_tensor().detach() for p in (model.big, model.small)]
        assert _same(big, _coded_by(whole[0].chunk(r.size), WEIGHTS, table))
        assert _same(small, _coded_by(whole[1].chunk(r.size), WEIGHTS, even)), "a small tensor's levels are even"
    uniform, learned = _errors(whole[0], r.size, WEIGHTS, (even, table))
    assert learned < 0.8 * uniform
    other = torch.randn(BIG, generator=torch.Generator().manual_seed(9))  # gradients are of its kind
    uniform, learned = _errors(other, r.size, GRADIENTS, (torch.arange(16) / 15, gradients["levels"][0]))
    assert learned < 0.9 * uniform
    return table, gradients["levels"], big


def _resumed(r):
    r.init("lowcomm")
    model, comms, optimizer = _make(r, learn_at=(1, 4))
    for step in range(3):
        _step(r, model, optimizer, step)
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(comms.state_dict())
    rest = [_step(r, model, optimizer, step) for step in range(3, 6)]
    assert comms.state_dict()["weights.0.levels"]["versions"] == [2]

    again, its_comms, its_optimizer = _make(r, learn_at=(1, 4))
    again.load_state_dict(saved)
    its_comms.load_state_dict(state)
    assert [_step(r, again, its_optimizer, step) for step in range(3, 6)] == rest
    ours, theirs = comms.state_dict(), its_comms.state_dict()
    for key in ("weights.0.levels", "gradients.0.levels"):
        assert _same(ours[key]["levels"], theirs[key]["levels"]), key
    return state


def test_distributed_checkpoint(r, tmp_path):
    """The handle is a Stateful: torch's own checkpoints save and load it."""
    r.init("lowcomm")
    model, comms, optimizer = _make(r, learn_at=(1,))
    for step in range(3):
        _step(r, model, optimizer, step)
    dcp.save({"comms": comms}, checkpoint_id=tmp_path)
    _, other, _ = _make(r, learn_at=(1,))
    dcp.load({"comms": other}, checkpoint_id=tmp_path)
    ours, theirs = comms.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert ours["weights.0"] == theirs["weights.0"] == 3
    for key in ("weights.0.levels", "gradients.0.levels"):
        assert ours[key]["versions"] == theirs[key]["versions"] == [1]
        assert _same(ours[key]["levels"], theirs[key]["levels"]), key


def _loaded(r, state):
    """On another number of ranks: tables are whole tensors', by name."""
    r.init("lowcomm")
    model, comms, optimizer = _make(r, learn_at=(1, 4))
    comms.load_state_dict(state)
    for key in ("weights.0.levels", "gradients.0.levels"):
        assert _same(comms.state_dict()[key]["levels"], state[key]["levels"]), key
    _step(r, model, optimizer, 3)


def test_a_resumed_run_has_its_levels(pair, quad):
    state = pair(_resumed)[0]
    quad(_loaded, state)


def test_mistakes(r):
    r.init("lowcomm")
    _, comms, _ = _make(r)
    state = copy.deepcopy(comms.state_dict())
    _, other, _ = _make(r, big=(513, 256))
    with pytest.raises(
        ValueError, match=r"expected those of big \[513, 256\] levels3:bucket=1024, got big \[512, 256\]"
    ):
        other.load_state_dict(state)
    bad = copy.deepcopy(state)
    bad["gradients.0.levels"]["tensors"] = []
    with pytest.raises(ValueError, match=r"expected those of big \[512, 256\] levels4.*, got no other tensor"):
        comms.load_state_dict(bad)
    bad = copy.deepcopy(state)
    bad["gradients.0.levels"]["levels"][0, 3] = 2.0
    bad["weights.0.levels"]["levels"][0, 3] += 1e-3
    bad["weights.0"] = 7
    with pytest.raises(ValueError, match="level table: value 3: expected one above"):
        comms.load_state_dict(bad)
    now = comms.state_dict()
    assert now["weights.0"] == state["weights.0"]
    assert _same(now["weights.0.levels"]["levels"], state["weights.0.levels"]["levels"]), "half a state was loaded"

    fresh = _Two()
    fully_shard(fresh, mesh=init_device_mesh("cpu", (r.size,)))
    for steps, said in [((3, 3), r"\(3, 3\)"), ((4, 1), r"\(4, 1\)"), ((-1,), r"\(-1,\)"), ((1.5,), r"\(1.5,\)")]:
        with pytest.raises(
            ValueError, match=f"learn_at: expected optimizer steps, 0 or more, in ascending order, got {said}"
        ):
            lc.fsdp.quantize(fresh, weights=WEIGHTS, learn_at=steps)
    with pytest.raises(ValueError, match="learn_at: expected optimizer steps.*got 400"):
        lc.fsdp.quantize(fresh, weights=WEIGHTS, learn_at=400)
    with pytest.raises(ValueError, match=r"learn_at: expected none without a levels codec, got \(3,\) with minmax8"):
        lc.fsdp.quantize(fresh, learn_at=(3,))
    with pytest.raises(dist.DistBackendError, match=r"(?s)levels learned at steps \[[23]\]"):
        lc.fsdp.quantize(fresh, weights=WEIGHTS, learn_at=(2 + r.rank,))
    lc.fsdp.quantize(fresh, weights=WEIGHTS)  # at the paper's steps


def test_ranks_with_different_tables(r):
    """A rank whose table is another's does not decode quietly: both versions are named."""
    r.init("lowcomm")
    model, comms, _ = _make(r)
    state = comms.state_dict()
    if r.rank == 1:
        state["weights.0.levels"]["versions"] = [5]
        state["weights.0.levels"]["levels"][0, 3] += 1e-3
    comms.load_state_dict(state)
    with pytest.raises(dist.DistBackendError, match=r"(?s)codec.*levels of version [05].*levels of version [05]"):
        model(0)
    dist.destroy_process_group()  # a lost group


@pytest.mark.parametrize("where", ["bf16", "replicas"])
@pytest.mark.on("quad", alike=True)
def test_learning_where_shards_are_cast_or_kept_twice(r, where):
    """Learned before the first step, from shards that are cast, or that replicas have too."""
    r.init("lowcomm")
    model = _Two()
    if where == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cpu", (r.size,)), mp_policy=policy)
    else:
        names = ("replicate", "shard")
        fully_shard(model, mesh=init_device_mesh("cpu", (2, r.size // 2), mesh_dim_names=names))
    whole = model.big.full_tensor().detach()
    shards = whole.chunk(r.size if where == "bf16" else r.size // 2)
    comms = lc.fsdp.quantize(model, weights=WEIGHTS, gradients=GRADIENTS, learn_at=(0,))
    model(r.rank).backward()
    seen = _seen(model, "big")
    states = [comms.state_dict()[f"{what}.0.levels"] for what in ("weights", "gradients")]
    assert [state["versions"] for state in states] == [[1], [1]]
    table = states[0]["levels"][0]
    uniform, learned = _errors(whole, len(shards), WEIGHTS, (torch.arange(8) / 7, table))
    assert learned < 0.8 * uniform
    assert _same(seen, _coded_by([shard.to(seen.dtype) for shard in shards], WEIGHTS, table))
    return table, seen
