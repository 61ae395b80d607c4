"""lc.SeedReplay on one machine: estimates, perturbed evaluations, options, mistakes."""

import copy
import math

import pytest
import seed_replay_model
import torch
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm import _C

NOISES, CODECS = ("rademacher", "gaussian"), ("logbyte", "log9", "sign1", "fp16", "none")


def _mean(losses):
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    "options",
    [
        *({"noise": noise, "codec": codec, "least": 0.35} for noise in NOISES for codec in CODECS),
        {"lr_scale": "mean", "lr": 4e-2},
        {"pool": 64},
        {"pool": 64, "base": "int8"},
        {"pool": 64, "base": "nf4"},
        {"perturb": "in-place"},
        {"perturb": "in-place", "restore_every": 8},
        {"estimator": "one-sided", "lr": 1e-2, "eps": 1e-2},
        {"dtype": torch.bfloat16, "lr": 4e-2, "eps": 1e-2},
        {"dtype": torch.float16, "lr": 4e-2, "eps": 1e-2},
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()),
)
def test_every_variant_learns(options):
    options = dict(options)
    least, dtype = options.pop("least", 0.6), options.pop("dtype", torch.float32)
    model, optimizer = seed_replay_model.machine(seed_replay_model.net(dtype), samples=16, **options)
    losses = [
        optimizer.step(lambda sample: seed_replay_model.loss(model, 64 * optimizer.iteration + sample))
        for _ in range(60)
    ]
    assert _mean(losses[-5:]) < least * losses[0]
    assert all(p.dtype == dtype for p in model.parameters())


def test_an_iteration_is_the_formula():
    """By hand, with torch alone except for the perturbation: loss differences, the byte, the step."""
    model, optimizer = seed_replay_model.machine(codec="none", samples=3, seed=5, weight_decay=0.1)
    twin = seed_replay_model.net()
    core = _C.SeedReplay(
        [(n, p.detach(), True, 0) for n, p in twin.named_parameters()],
        {"noise": "rademacher", "codec": "none", "lr_scale": "sqrt", "seed": 5, "pool": 0, "base": ""},
    )
    start = [p.detach().clone() for p in twin.parameters()]
    estimates, directions = [], []
    for sample in range(3):
        z = [(core.perturbed(i, 0, sample, 1.0) - w).round() for i, w in enumerate(start)]
        assert all(bool((d.abs() == 1).all()) for d in z)
        both = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, w, d in zip(twin.parameters(), start, z, strict=True):
                    p.copy_(w + sign * 1e-3 * d)
            both.append(float(seed_replay_model.loss(twin, sample).detach()))
        estimates.append((both[0] - both[1]) / 2e-3)
        directions.append(z)
    seed_replay_model.train(model, optimizer, 1)
    for i, (p, w) in enumerate(zip(model.parameters(), start, strict=True)):
        step = sum(e * d[i] for e, d in zip(estimates, directions, strict=True))
        keep = 1 - 1e-2 * 0.1 if p.dim() > 1 else 1
        torch.testing.assert_close(p.detach(), keep * w - 1e-2 / math.sqrt(3) * step, rtol=0, atol=1e-6)


def test_evaluations_leave_the_weights():
    model, optimizer = seed_replay_model.machine()
    memory = {name: p.detach().numpy() for name, p in model.named_parameters()}  # which no function of torch reads
    before = copy.deepcopy(memory)
    seen = []

    def closure(sample):
        seen.append(copy.deepcopy(memory))
        assert not model.training and not torch.is_grad_enabled()
        return seed_replay_model.loss(model, sample)

    optimizer.step(closure)
    assert len(seen) == 8
    assert all((state[name] == before[name]).all() for state in seen for name in before), "the weights were touched"
    assert model.training and all("_parameters" in vars(m) and type(m._parameters) is dict for m in model.modules())


def test_a_raising_closure_changes_nothing():
    model, optimizer = seed_replay_model.machine()
    before = copy.deepcopy(model.state_dict())
    for perturb in ("at-use", "in-place"):
        model, optimizer = seed_replay_model.machine(perturb=perturb)

        def closure(sample, model=model):
            if sample == 2:
                raise KeyError("the user's")
            return seed_replay_model.loss(model, sample)

        with pytest.raises(KeyError):
            optimizer.step(closure)
        assert optimizer.iteration == 0 and model.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), perturb


class _Odd(nn.Module):
    """Tied weights, a weight that another module reads, a recurrent layer's flat weights, attention, and one never used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.lstm = nn.LSTM(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        x = self.lstm(self.embed(tokens))[0]
        x = x + self.attention(x, x, x)[0]
        return self.head(nn.functional.linear(x, self.scale.weight))


def test_weights_read_in_every_way_are_perturbed():
    """The estimate equals the in-place one's, whichever way a model reads its weights."""
    tokens = torch.arange(12).view(6, 2)
    records = []
    for perturb in ("in-place", "at-use"):
        torch.manual_seed(0)
        model, optimizer = seed_replay_model.machine(_Odd(), codec="none", perturb=perturb, samples=6, eps=1e-2)
        for _ in range(2):
            optimizer.step(lambda sample, model=model: model((tokens + sample) % 16).square().mean())
        records.append(_C.read_replay_records(optimizer.core.log)[0]["bytes"])
    values = [torch.frombuffer(bytearray(record[38:-4]), dtype=torch.float32) for record in records]
    assert len(values[0]) == 6 and values[0].abs().min() > 1e-3
    torch.testing.assert_close(values[0], values[1], rtol=2e-2, atol=2e-4)


class _Adapted(nn.Module):
    """A frozen layer and a low-rank one next to it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, layer.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(layer.out_features, 4))

    def forward(self, x):
        return self.layer(x) + x @ self.a.t() @ self.b.t()


def test_lora_only():
    model = seed_replay_model.net()
    model[0], model[2] = _Adapted(model[0]), _Adapted(model[2])
    frozen = [model[0].layer.weight.clone(), model[2].layer.weight.clone()]
    model, optimizer = seed_replay_model.machine(model, samples=16, lr=3e-2)
    assert optimizer.core.description.count(":Float") == 4
    losses = seed_replay_model.train(model, optimizer, 60)
    assert _mean(losses[-5:]) < 0.5 * losses[0]
    assert torch.equal(model[0].layer.weight, frozen[0]) and torch.equal(model[2].layer.weight, frozen[1])


def test_time_bounded():
    """Samples until the time is over, one at least; with samples= at most so many."""
    model, optimizer = seed_replay_model.machine(samples=None, seconds=1e-9)
    seed_replay_model.train(model, optimizer, 3)
    assert optimizer.stats()["gradients"] == 3
    model, optimizer = seed_replay_model.machine(samples=2, seconds=1e9)
    seed_replay_model.train(model, optimizer, 3)
    assert optimizer.stats()["gradients"] == 6


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("estimator", ["two-sided", "one-sided"])
def test_no_number_is_skipped(estimator, codec):
    """A loss that is none makes estimates that nobody applies; training goes on."""
    model, optimizer = seed_replay_model.machine(estimator=estimator, samples=4, codec=codec)
    calls = []

    def closure(sample):
        calls.append(sample)
        return math.nan if len(calls) == 4 else seed_replay_model.loss(model, sample)

    for _ in range(3):
        assert math.isfinite(optimizer.step(closure))
    stats = optimizer.stats()
    assert stats["skipped"] >= 1 and stats["gradients"] + stats["skipped"] == 12
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert math.isnan(optimizer.step(lambda: math.inf))


def test_a_non_differentiable_objective():
    """Accuracy itself: what back-propagation has no gradient of."""
    model, optimizer = seed_replay_model.machine(samples=16, eps=3e-2, lr=5e-2)

    def errors(number):
        x, y = seed_replay_model.batch(number, 512)
        return float((model(x).argmax(1) != y).float().mean())

    with torch.no_grad():
        before = errors(10**6)
    for _ in range(60):
        optimizer.step(lambda sample: errors(64 * optimizer.iteration + sample))
    with torch.no_grad():
        assert errors(10**6) < 0.5 * before


def test_a_scheduler_works():
    model, optimizer = seed_replay_model.machine(samples=1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        seed_replay_model.train(model, optimizer, 1)
        schedule.step()
    assert [r["lr"] for r in _C.read_replay_records(optimizer.core.log)] == pytest.approx([1e-2, 5e-3, 2.5e-3])


@pytest.mark.parametrize("options", [{}, {"perturb": "in-place", "restore_every": 3}, {"pool": 8, "base": "int8"}])
def test_resume_to_the_bit(options):
    model, optimizer = seed_replay_model.machine(**options)
    seed_replay_model.train(model, optimizer, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.snapshot()))
    seed_replay_model.train(model, optimizer, 5)
    other, second = seed_replay_model.machine(**options)
    second.load_snapshot(saved[1])
    assert second.iteration == 4
    seed_replay_model.train(other, second, 5)
    if (
        "restore_every" not in options
    ):  # else it was put right at other iterations, and what was measured differs by roundings
        assert second.core.checksum() == optimizer.core.checksum()
    third_model, third = seed_replay_model.machine(**options)
    with pytest.raises(ValueError, match="which it was saved with, got .*: load the model's state first"):
        third.load_state_dict({**saved[1]["optimizer"], "replay": {**saved[1]["optimizer"]["replay"], "checksum": 1}})
    if not options:
        third_model.load_state_dict(saved[0])
        third.load_state_dict(saved[1]["optimizer"])
        seed_replay_model.train(third_model, third, 5)
        assert third.core.checksum() == optimizer.core.checksum()


def test_a_folder_brings_a_machine_back(tmp_path):
    model, optimizer = seed_replay_model.machine(checkpoint=tmp_path / "a", snapshot_every=4)
    seed_replay_model.train(model, optimizer, 10)
    sums = optimizer.core.checksum()
    files = [*(f"log-{n}.{kind}" for n in (4, 8) for kind in ("bin", "crc")), "snapshot-4.pt", "snapshot-8.pt"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == files
    with (tmp_path / "a" / "log-8.bin").open("ab") as file:
        file.write(b"\x40\x00\x00\x00half a record")  # killed while it wrote
    back, again = seed_replay_model.machine(checkpoint=tmp_path / "a", snapshot_every=4)
    assert again.iteration == 10 and again.core.checksum() == sums
    seed_replay_model.train(model, optimizer, 7)
    seed_replay_model.train(back, again, 7)
    assert again.core.checksum() == optimizer.core.checksum()
    assert _C.read_replay_records(again.core.log)[0]["iteration"] == 12, "for machines that are behind"
    with pytest.raises(ValueError, match=r"expected one of .*seed=1.*, got one of .*seed=0"):
        seed_replay_model.machine(checkpoint=tmp_path / "a", seed=1)


def test_a_folder_follows_a_leap(tmp_path):
    """Weights that no record made: what is trained after them is what comes back."""
    model, optimizer = seed_replay_model.machine(checkpoint=tmp_path, snapshot_every=4)
    seed_replay_model.train(model, optimizer, 3)
    early = copy.deepcopy(optimizer.snapshot())
    seed_replay_model.train(model, optimizer, 7)
    optimizer.load_snapshot(early)
    seed_replay_model.train(model, optimizer, 2)
    _, again = seed_replay_model.machine(checkpoint=tmp_path, snapshot_every=4)
    assert again.iteration == 5 and again.core.checksum() == optimizer.core.checksum()


@pytest.mark.parametrize("perturb", ["at-use", "in-place"])
def test_a_refused_snapshot_changes_nothing(perturb):
    model, optimizer = seed_replay_model.machine(perturb=perturb)
    seed_replay_model.train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.snapshot())
    saved["weights"]["0.bias"][3] += 1
    seed_replay_model.train(model, optimizer, 2)
    before, checksum = copy.deepcopy(model.state_dict()), optimizer.core.checksum()
    with pytest.raises(ValueError, match="expected weights with CRC-32C"):
        optimizer.load_snapshot(saved)
    assert optimizer.iteration == 4 and optimizer.core.checksum() == checksum
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_log_replays_on_the_base_model():
    """Bytes in place of weights: whoever has the base model and the log has the tuned one."""
    model, optimizer = seed_replay_model.machine()
    seed_replay_model.train(model, optimizer, 30)
    assert len(optimizer.core.log) < 30 * 60
    other, second = seed_replay_model.machine()
    assert second.replay(optimizer.core.log) == 120
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="expected iteration 30, got 0"):
        second.replay(optimizer.core.log)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"lr": 0}, ValueError, "lr: expected a finite number above 0, got 0"),
        ({"eps": math.nan}, ValueError, "eps: expected a finite number above 0, got nan"),
        ({"samples": 0}, ValueError, "samples: expected an integer of 1 or more, got 0"),
        ({"samples": 70000}, ValueError, "samples: expected 65535 or fewer, got 70000"),
        ({"weight_decay": -1}, ValueError, "weight_decay: expected a finite number, 0 or more"),
        ({"noise": "uniform"}, ValueError, "SeedReplay: noise: expected rademacher or gaussian, got 'uniform'"),
        ({"codec": "sym4"}, ValueError, "codec: expected logbyte, log9, fp16, none or sign1, got 'sym4'"),
        ({"lr_scale": "k"}, ValueError, "lr_scale: expected sqrt or mean, got 'k'"),
        ({"estimator": "three"}, ValueError, "estimator: expected one of two-sided"),
        ({"estimator": "one-sided", "samples": 1}, ValueError, "expected samples=2 or more, got 1"),
        ({"base": "int8"}, ValueError, "expected pool=K with it"),
        ({"base": "int4", "pool": 4}, ValueError, "base: expected int8 or nf4, got 'int4'"),
        (
            {"base": "nf4", "pool": 4, "noise": "gaussian"},
            ValueError,
            "base 'nf4': expected noise rademacher, got gaussian",
        ),
        ({"base": "int8", "pool": 4, "perturb": "in-place"}, ValueError, "expected no base"),
        ({"perturb": "both"}, ValueError, "perturb: expected at-use or in-place, got 'both'"),
        ({"learning_rate": 1}, TypeError, r"SeedReplay: .* lr, group, .*got 'learning_rate' \(did you mean lr\?\)"),
    ],
)
def test_options_that_will_not_do(options, error, match):
    with pytest.raises(error, match=match):
        seed_replay_model.machine(**options)


def test_models_that_will_not_do():
    with pytest.raises(TypeError, match="expected a torch.nn.Module, got list"):
        lc.SeedReplay([torch.ones(2)], lr=1)
    with pytest.raises(ValueError, match="expected parameters that require gradients, got none"):
        lc.SeedReplay(seed_replay_model.net().requires_grad_(False), lr=1)
    with pytest.raises(TypeError, match=r"parameter '0.weight': expected float32, float16 or bfloat16, got Double"):
        lc.SeedReplay(seed_replay_model.net(torch.float64), lr=1)
    _, optimizer = seed_replay_model.machine()
    with pytest.raises(ValueError, match="expected a closure that evaluates the loss, got None"):
        optimizer.step()
    with pytest.raises(ValueError, match="expected the key 'replay'"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(ValueError, match="weight_decay: expected 0 with base 'int8', which is never written, got 0.1"):
        seed_replay_model.machine(base="int8", pool=4, weight_decay=0.1)
