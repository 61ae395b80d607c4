"""lc.SeedReplay in a static group: every rank a machine, one all_gather an iteration, the same bits everywhere."""

import pytest
import seed_replay_model
import torch
import torch.distributed as dist

from torch_lowcomm import _C

SIZE, SAMPLES, ITERATIONS = 4, 3, 6


def _run(r, **options):
    r.init()
    options = {"samples": SAMPLES, "weight_decay": 0.0 if "base" in options else 0.01, "check_every": 2, **options}
    model, optimizer = seed_replay_model.machine(group=dist.group.WORLD, **options)
    for t in range(ITERATIONS):
        optimizer.step(lambda sample, t=t: seed_replay_model.loss(model, 100 * t + SAMPLES * r.rank + sample))
    return optimizer


@pytest.mark.later
@pytest.mark.parametrize(
    "options",
    [{}, {"noise": "gaussian", "codec": "log9"}, {"perturb": "in-place"}, {"pool": 16, "base": "int8"}],
    ids=str,
)
@pytest.mark.on(SIZE, alike=True)
def test_all_ranks_end_with_the_same_bits(r, options):
    optimizer = _run(r, **options)
    stats = optimizer.stats()
    if options.get("codec") != "log9":  # a byte a gradient, to every other machine
        assert stats["payload_bytes"] == ITERATIONS * SAMPLES * (SIZE - 1)
    assert stats["machines"] == SIZE and stats["gradients"] == ITERATIONS * SAMPLES * SIZE
    assert stats["evaluations"] >= 2 * ITERATIONS * SAMPLES
    return optimizer.core.checksum(), optimizer.core.log


@pytest.mark.parametrize("noise", ["rademacher", "gaussian"])
@pytest.mark.on(SIZE)
def test_four_ranks_equal_one_that_takes_all_samples(r, noise):
    """With equal ids: 4 ranks x n directions and 1 rank x 4n end with the same bits."""
    spread = _run(r, noise=noise).core
    _, optimizer = seed_replay_model.machine(samples=SAMPLES, weight_decay=0.01, noise=noise)
    core = optimizer.core
    for t in range(ITERATIONS):
        messages = []
        for machine in range(SIZE):
            estimates = []
            for sample in range(SAMPLES):
                losses = [
                    _at(core, machine, sample, eps, 100 * t + SAMPLES * machine + sample) for eps in (1e-3, -1e-3)
                ]
                estimates.append((losses[0] - losses[1]) / 2e-3)
            messages.append(core.message(machine, estimates))
        core.apply(core.record(messages, lr=1e-2, weight_decay=0.01))
    assert core.log == spread.log and core.checksum() == spread.checksum()


def _at(core, machine, sample, factor, batch):
    model = seed_replay_model.net()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(core.perturbed(number, machine, sample, factor))
        return float(seed_replay_model.loss(model, batch))


@pytest.mark.parametrize("seconds", [None, 60.0])
@pytest.mark.on(2, alike=True)
def test_lists_of_different_lengths(r, seconds):
    r.init()
    model, optimizer = seed_replay_model.machine(samples=2 + r.rank, seconds=seconds, group=dist.group.WORLD)
    seed_replay_model.train(model, optimizer, 3)
    assert [entry["counts"] for entry in _C.read_replay_records(optimizer.core.log)] == [[2, 3]] * 3
    return optimizer.core.checksum()


@pytest.mark.later
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("seed", "options and parameters: expected the same on all ranks, got 'seed=0"),
        ("codec", "options and parameters: expected the same on all ranks, got 'codec=logbyte"),
        ("check_every", "options and parameters: expected the same on all ranks, got 'check_every=2"),
        ("model", "options and parameters: expected the same on all ranks"),
        ("weights", "checksum of the weights: expected the same on all ranks"),
    ],
)
@pytest.mark.on(2)
def test_ranks_that_differ(r, what, said):
    r.init()
    others = {"seed": {"seed": 1}, "check_every": {"check_every": 3}, "codec": {"codec": "log9"}}
    options = {"check_every": 2} | (others.get(what, {}) if r.rank else {})
    model = seed_replay_model.net()
    if what == "weights" and r.rank:
        with torch.no_grad():
            model[0].bias[3] += 1
    if what == "model" and r.rank:
        model = torch.nn.Linear(seed_replay_model.WIDTH, seed_replay_model.CLUSTERS)
    model, optimizer = seed_replay_model.machine(model, group=dist.group.WORLD, **options)
    with pytest.raises(ValueError, match=f"{said}(?s:.*)ranks 0 and 1"):
        seed_replay_model.train(model, optimizer, 1)


@pytest.mark.on(2)
def test_rates_that_differ(r):
    """Nothing is applied, and perturbations in place leave no rounding."""
    r.init()
    model, optimizer = seed_replay_model.machine(group=dist.group.WORLD, perturb="in-place")
    seed_replay_model.train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] *= 1 + r.rank
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(
        ValueError, match=r"iteration 1: expected one lr and weight decay on all ranks, got .* on ranks 0 and 1"
    ):
        seed_replay_model.train(model, optimizer, 1)
    assert optimizer.iteration == 1 and all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.on(2)
def test_weights_that_part_are_found(r):
    r.init()
    model, optimizer = seed_replay_model.machine(group=dist.group.WORLD, check_every=2)
    seed_replay_model.train(model, optimizer, 1)
    if r.rank == 1:
        with torch.no_grad():
            model[2].bias[0] += 1e-3
    with pytest.raises(
        RuntimeError, match=r"iteration 2: expected equal weights, got CRC-32C .* on rank 0 and .* on rank 1"
    ):
        seed_replay_model.train(model, optimizer, 1)


@pytest.mark.on(2, allow_exit={1: 0})
def test_a_lost_rank_is_a_named_error_and_nothing_is_applied(r):
    r.init()
    model, optimizer = seed_replay_model.machine(group=dist.group.WORLD)
    seed_replay_model.train(model, optimizer, 2)
    if r.rank == 1:
        raise SystemExit(0)
    before = optimizer.core.checksum()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        seed_replay_model.train(model, optimizer, 50)
    assert optimizer.core.checksum() == before and optimizer.iteration == 2
