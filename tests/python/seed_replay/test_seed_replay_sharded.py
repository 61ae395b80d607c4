"""Machines of several ranks (FSDP2): the bits of unsharded machines, one message a machine."""

import datetime
import math
import re

import pytest
import ranks
import seed_replay_model
import seed_replay_sharded as cases
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from torch_lowcomm import _C

ITERATIONS = 4


def _sharded(r, shards, dtype, options):
    r.init()
    mesh, group = cases.machines(r, shards)
    model = cases.sharded(mesh, dtype)
    optimizer = cases.optimizer_of(model, group=group, **options)
    machine = r.rank // shards
    losses = []
    for iteration in range(ITERATIONS):
        losses.append(cases.step(model, optimizer, machine))
        with torch.no_grad():
            if iteration == 1:  # the root keeps what this gathers, and must not go on with it
                seed_replay_model.loss(model, 7)
    return cases.told(model, optimizer, losses)


@pytest.mark.later
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"noise": "gaussian", "codec": "log9", "lr_scale": "mean"},
        {"perturb": "in-place", "restore_every": 3},
        {"estimator": "one-sided", "eps": 1e-2},
        {"estimator": "one-sided", "pool": 16},
        {"dtype": torch.bfloat16, "eps": 1e-2},
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()) or "defaults",
)
def test_two_machines_of_two_ranks_equal_two_of_one(options):
    wholes = cases.unsharded(2, ITERATIONS, **options)
    options = dict(options)
    found = ranks.run_ranks(_sharded, 4, 2, options.pop("dtype", torch.float32), options)
    for rank, one in enumerate(found):  # in place, weights drift apart between machines
        cases.expect_equal(one, wholes[rank // 2])
        assert one["losses"] == wholes[rank // 2]["losses"]
    # One message a machine: the first rank sends what a machine of one rank sends, the others nothing.
    of_one = wholes[0]["stats"]
    assert [one["stats"]["sent_bytes"] for one in found] == [of_one["sent_bytes"], 0, of_one["sent_bytes"], 0]
    assert [one["stats"]["machines"] for one in found] == [2] * 4
    assert of_one["sent_bytes"] > 0 and found[1]["stats"]["payload_bytes"] == of_one["payload_bytes"]


def _alone(r, shape, iterations, apart, options):
    """One machine of all ranks: FSDP2, or HSDP where the mesh has two dimensions. Ranks may evaluate batches of their own."""
    r.init()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[2 - len(shape) :])
    model = cases.sharded(mesh)
    optimizer = cases.optimizer_of(model, **options)
    losses = []
    for _ in range(iterations):
        iteration = optimizer.iteration
        losses.append(
            optimizer.step(
                lambda sample, t=iteration: seed_replay_model.loss(
                    model, cases.batch_of(r.rank if apart else 0, t, sample)
                )
            )
        )
    return cases.told(model, optimizer, losses)


def _alone_whole(iterations, batches):
    """The same by one rank that evaluates all batches."""
    model = cases.Net()
    optimizer = cases.optimizer_of(model)

    def loss(sample):
        losses = [float(seed_replay_model.loss(model, cases.batch_of(b, optimizer.iteration, sample))) for b in batches]
        return math.fsum(losses) / len(losses)

    return cases.told(model, optimizer, [optimizer.step(loss) for _ in range(iterations)])


@pytest.mark.later
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
def test_ranks_with_batches_of_their_own_average_their_losses(shape):
    size = math.prod(shape)
    whole = _alone_whole(ITERATIONS, range(size))
    for one in ranks.run_ranks(_alone, size, shape, ITERATIONS, True, {}):
        cases.expect_equal(one, whole)
        assert one["losses"] == whole["losses"]


def test_samples_by_time_end_together():
    found = ranks.run_ranks(_alone, 2, (2,), 2, False, {"samples": None, "seconds": 1e-9})
    assert found[0]["stats"]["gradients"] == 2 and found[0]["log"] == found[1]["log"]


def _mixed(r):
    """A machine of two ranks and a machine of one, whose ranks are all the group needs."""
    r.init()
    group = dist.new_group([0, 2])
    pair = dist.new_group([0, 1])
    if r.rank == 2:
        model, machine = cases.Net(), 1
    else:
        model, machine = cases.sharded(DeviceMesh.from_group(pair, "cpu")), 0
    optimizer = cases.optimizer_of(model, group=group)
    return cases.told(model, optimizer, [cases.step(model, optimizer, machine) for _ in range(ITERATIONS)])


def test_machines_of_different_sizes():
    whole = cases.unsharded(2, ITERATIONS)[0]
    for one in ranks.run_ranks(_mixed, 3):
        cases.expect_equal(one, whole)


@pytest.mark.on(2, alike=True)
def test_mixed_precision(r):
    """FSDP2 casts the shards to bfloat16 before it gathers them: they are perturbed before."""
    r.init()
    mesh, group = cases.machines(r, 2)
    model = fully_shard(cases.Net(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = cases.optimizer_of(model, group=group, eps=5e-2, codec="none")
    losses = [optimizer.step(lambda s, t=t: seed_replay_model.loss(model, 100 * t + s)) for t in range(2)]
    estimates = _C.read_replay_records(optimizer.core.log)
    assert all(math.isfinite(loss) for loss in losses)
    return optimizer.core.checksum(), losses, len(estimates)


@pytest.mark.later
@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "seed",
            "options and parameters: expected the same on all ranks of a machine, got 'seed=0 .* and 'seed=1 .* 0 and 1",
        ),
        ("estimator", "got 'estimator=two-sided .* and 'estimator=one-sided .* ranks 0 and 1"),
        ("eps", r"got 'eps=0\.001 .* and 'eps=0\.002 .* ranks 0 and 1"),
        (
            "lr of 0",
            "rank 1: SeedReplay: lr: expected a finite number above 0, got 0.0|^SeedReplay: lr: expected a finite",
        ),
        ("group", "meeting=group None .* and 'meeting=alone"),
        ("frozen", "norm.weight:.* and 'norm.bias:"),
        ("rates", "step: expected the same on all ranks of a machine, got"),
        (
            "not finite",
            "rank 1: .*expected a finite learning rate|^seed replay record of iteration 0: expected a finite",
        ),
    ],
    ids=lambda value: value if len(value) < 12 else "",
)
@pytest.mark.on(2)
def test_ranks_of_a_machine_that_differ(r, what, said):
    """Both ranks of machine 0 say so; a rank on its own would wait for the other for ever."""
    r.init()
    mesh, group = cases.machines(r, 2)
    model = cases.sharded(mesh)
    odd = r.rank == 1
    others = {
        "seed": {"seed": 1},
        "estimator": {"estimator": "one-sided"},
        "eps": {"eps": 2e-3},
        "lr of 0": {"lr": 0.0},
        "group": {"group": None},
    }
    options = {"group": group} | (others.get(what, {}) if odd else {})
    if what == "frozen" and odd:
        model.norm.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=said):
        optimizer = cases.optimizer_of(model, **options)
        if what == "rates":
            optimizer.param_groups[0]["lr"] *= 1 + r.rank
        if what == "not finite" and odd:
            optimizer.param_groups[0]["lr"] = math.nan
        before = optimizer.stats()["sent_bytes"]
        try:
            cases.step(model, optimizer, 0)
        finally:
            assert optimizer.stats()["sent_bytes"] == before, "it was refused before anything was sent"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("columns", r"parameter '0.weight': expected Shard\(0\) on one dimension .*, got \(Shard\(dim=1\),\)"),
        ("base", "base 'int8': expected whole parameters, got a shard of"),
        ("group", "group: expected one rank of each machine, got ranks .* of this one too"),
    ],
    ids=lambda value: value if len(value) < 12 else "",
)
@pytest.mark.on(2)
def test_what_shards_do_not_do_is_refused(r, what, said):
    r.init()
    mesh = init_device_mesh("cpu", (2,))
    options = {}
    model = cases.Net()
    if what == "columns":
        model.into = torch.nn.Linear(seed_replay_model.WIDTH, 32)
        model = torch.nn.Sequential(model.into)
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)
    else:
        fully_shard(model, mesh=mesh)
    if what == "base":
        options = {"base": "int8", "pool": 4, "weight_decay": 0.0}
    if what == "group":
        options = {"group": dist.group.WORLD}
    with pytest.raises(ValueError, match=said):
        cases.optimizer_of(model, **options)


def _nan(r):
    r.init()
    mesh, group = cases.machines(r, 2)
    model = cases.sharded(mesh)
    optimizer = cases.optimizer_of(model, group=group)
    for iteration in range(3):

        def loss(sample, iteration=iteration):
            bad = r.rank == 1 and iteration == 1 and sample == 2
            return seed_replay_model.loss(model, 10 * iteration + sample) * (math.nan if bad else 1.0)

        optimizer.step(loss)
    return cases.told(model, optimizer, [])


def test_a_loss_that_is_nan_on_one_rank_is_skipped_by_all():
    said = []
    found = ranks.run_ranks(_nan, 4, outputs=said)
    for one in found:
        cases.expect_equal(one, found[0])
        assert one["stats"]["skipped"] == 1 and one["stats"]["gradients"] == 3 * 2 * 3 - 1
        assert all(bool(value.isfinite().all()) for value in one["weights"].values())
    assert re.search(r"the loss is not finite on ranks \[1\] of this machine's ranks \[0, 1\]", said[0]), said


def _raises_alone(r, told_by):
    """The closure raises on rank 1 alone, which then ends, or lives on until the others were told by the group's timeout."""
    r.init()
    mesh, group = cases.machines(r, 2)
    model = cases.sharded(mesh)
    optimizer = cases.optimizer_of(model, group=group)
    cases.step(model, optimizer, r.rank // 2)
    before = [p.to_local().clone() for p in model.parameters()]
    if told_by == "timeout":
        for one in (mesh.get_group(), group):
            one.set_timeout(datetime.timedelta(seconds=3))

    def loss(sample):
        value = seed_replay_model.loss(model, sample)
        if r.rank == 1 and sample == 1:
            raise KeyError("the user's")
        return value

    with pytest.raises(KeyError if r.rank == 1 else (dist.DistBackendError, RuntimeError)) as error:
        optimizer.step(loss)
    same = all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
    assert same and optimizer.iteration == 1
    if told_by == "timeout":
        r.meet_at("told")
    elif r.rank == 1:
        r.say("unchanged")
        raise SystemExit(3)
    else:
        r.hear("unchanged")
    return str(error.value)


@pytest.mark.later
@pytest.mark.parametrize("told_by", ["end", "timeout"])
def test_a_closure_that_raises_on_one_rank_alone_is_an_error_on_all(told_by):
    """Rank 0 waits for rank 1 in its machine, and machine 1 for rank 0."""
    found = ranks.run_ranks(_raises_alone, 4, told_by, allow_exit={1: 3} if told_by == "end" else None)
    assert all(found[rank] for rank in (0, 2, 3)), found


@pytest.mark.on(4)
def test_replicas_that_differ_are_named(r):
    r.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = cases.sharded(mesh)
    if r.rank == 3:
        with torch.no_grad():
            model.into.weight.to_local()[0, 0] += 1
    optimizer = cases.optimizer_of(model)
    said = "iteration 0: expected equal weights in parameter 1, .* on rank 1 and .* on rank 3"
    with pytest.raises(RuntimeError, match=said):
        cases.step(model, optimizer, 0)
    assert optimizer.iteration == 0


@pytest.mark.on(2)
def test_weights_that_moved_are_named(r):
    r.init()
    mesh = init_device_mesh("cpu", (2,))
    model = cases.sharded(mesh)
    optimizer = cases.optimizer_of(model)
    cases.step(model, optimizer, 0)
    if r.rank == 1:
        model.into.weight._local_tensor = model.into.weight.to_local().clone()
    with pytest.raises(ValueError, match="parameter '.*': expected the memory that it had"):
        cases.step(model, optimizer, 0)
