"""lc.plan: seconds by hand, losses as the results have them, the table, what it measures, and what it refuses."""

import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_lowcomm as lc
from torch_lowcomm.planner import loss, training
from torch_lowcomm.planner.apply import comparison
from torch_lowcomm.planner.ways import all_ways

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
RATE = 12.5e6 * 1448 / 1514  # bytes a second of 100 Mbit/s


def link(rate="100mbit", sites=2, **options):
    return lc.planner.Link.of(rate, sites, **options)


def trained(parameters=10_000_000, step_s=0.3, **options):
    given = {"tokens": 512, "width": 384, "layers": 6, "matrices": [(1000, 1000)] * 9} | options
    return lc.planner.Training(parameters, step_s / 3, 2 * step_s / 3, codings=CODINGS, **given)


CODINGS = {name: training.Coding(found.bits, 0.5) for name, found in lc.planner.codings(torch.randn(1 << 12)).items()}


def test_rates_and_round_trips():
    here = link("10mbit/100mbit", round_trip="40ms")
    assert here.rate == RATE / 10
    assert here.exchange_s(RATE / 10) == pytest.approx(1 / 0.95 + 0.04)
    assert link(sites=4).all_reduce_s(RATE) == pytest.approx(1.5 / 0.87)  # 2(W - 1)/W, and the share that 4 hosts reach
    assert link(sites=1).all_reduce_s(RATE) == 0
    for wrong, said in (
        ({"rate": "100"}, 'rate: expected a number and a unit, such as "100mbit"'),
        ({"rate": "0mbit"}, "a rate above 0 .* got Link.*rate=0.0"),
        ({"sites": 0}, "expected 1 or more, .* got Link.sites=0"),
        ({"round_trip": "40"}, 'round trip: expected a number and a unit, such as "40ms"'),
        ({"loss": 1.0}, "a loss of 0 to under 1, got Link.*loss=1.0"),
    ):
        with pytest.raises(ValueError, match=f"plan: .*{said}"):
            link(**wrong)


def test_a_lossy_link_without_bbr(monkeypatch):
    """Sixteen flows of 1.22 segments / (round trip · √loss)."""
    monkeypatch.setattr("torch_lowcomm.planner.link._has_bbr", lambda: False)
    slow = link("1gbit", round_trip="100ms", loss=0.01)
    most = 16 * 1.22 * 1448 / (0.1 * 0.1)
    assert slow.exchange_s(most, round_trips=0) == pytest.approx(1 / 0.95)
    assert (
        training.pipeline_s(trained(), slow, 32, 32)[0] > 1.1 * training.pipeline_s(trained(), link("1gbit"), 32, 32)[0]
    )


def test_seconds_of_ddp_by_hand():
    """Two buckets: the second one becomes ready while the first travels, or after it has."""
    of = trained(parameters=13_000_000, step_s=0.9)  # 52 MB
    here = link("1gbit")
    each = 26e6 / (10 * RATE * 0.95)
    seconds, sent = training.ddp_s(of, here)
    assert sent == 52e6 and each < 0.3
    assert seconds == pytest.approx(0.9 + each)
    slow = link()
    assert training.ddp_s(of, slow)[0] == pytest.approx(0.6 + 2 * 10 * each)
    seconds, sent = training.ddp_s(of, slow, "sym8:bucket=128", factors=of.factor_elements(4))
    assert of.factor_elements(4) == 4_000_000 + 9 * 4 * 2000
    assert sent == pytest.approx(of.factor_elements(4) * CODINGS["sym8:bucket=128"].bits / 8)
    assert training.ddp_s(of, link(sites=1)) == (of.step_s, 0.0)


def test_seconds_of_fsdp_by_hand():
    """Two blocks, whose first gather hides behind nothing, and whose last reduce_scatter neither."""
    of = trained(parameters=2_000_000, step_s=3.0, layers=2)
    here = link()
    one = 4e6 / 2 / (RATE * 0.95)  # a gather or a reduce_scatter of a block
    seconds, sent = training.fsdp_s(of, here, None, None)
    assert sent == pytest.approx(0.5 * 3 * 8e6) and one < 0.5
    assert seconds == pytest.approx(3.0 + 3 * one + 1e-9 * training.SHARDS_NS * 2_000_000)


@pytest.mark.parametrize("rate", ["1mbit", "100mbit", "1gbit"])
@pytest.mark.parametrize("sites", [2, 3, 6])
def test_no_way_sends_more_than_its_link_carries(rate, sites):
    """A site of a pipeline sends activations one way and gradients the other way, over one link."""
    here = link(rate, sites)
    for way in all_ways(trained(step_s=1e-3), here):
        assert way.sent / way.step_s <= here.rate * 1.001, way


@pytest.mark.parametrize(
    ("mode", "fragments", "waits"), [("sync", 1, 6.4), ("continue", 1, 0), ("restart", 1, 4.9), ("restart", 2, 3.4)]
)
def test_seconds_of_outer_loops_by_hand(mode, fragments, waits):
    """A message of 6.4 s every 100 steps of .3 s: training waits for it, or for what 5 steps of a fragment leave."""
    of = trained(parameters=int(6.4 * RATE * 0.95 / 4))
    seconds, sent = training.outer_s(of, link(), None, 100, mode, fragments=fragments)
    local = training.OUTER_NS * 1e-9 * of.parameters
    assert seconds == pytest.approx(0.3 + (waits + local) / 100, rel=1e-4)
    assert sent == pytest.approx(4 * of.parameters / 100)
    crowded = training.outer_s(of, link(), None, 10, "continue")[0]  # an interval is shorter than the message
    assert crowded == pytest.approx(0.3 + (6.4 - 3.0 + local) / 10, rel=1e-4)


def test_losses_are_those_of_the_results():
    """Every measured factor is what its file gives: mean, least and most over the seeds of the base."""
    fields = {"ddp": "perplexity", "fsdp_bits": "perplexity", "aq_sgd": "validation", "subspace": "validation"}
    for (name, curve), told in loss.ROWS.items():
        content = json.loads((RESULTS / f"{name}.json").read_text())
        if name == "diloco_lab":
            rows = {row["name"]: row["losses"] for row in content["losses"][0]["rows"]}
            ratios = [a / b for a, b in zip(rows[curve], rows["torchft DiLoCo"], strict=True)]
        else:
            of: dict[str, dict[int, float]] = {}
            for found in content["curves"]:
                value = found.get(fields[name])
                value = math.log(value) if fields[name] == "perplexity" and value else value
                of.setdefault(found["name"], {})[found["seed"]] = value
            base = of["free" if name == "subspace" else "exact"]
            ratios = [value / base[seed] for seed, value in of[curve].items()]
        assert (statistics.mean(ratios), min(ratios), max(ratios)) == pytest.approx(told, abs=6e-5), (name, curve)


def test_sites_intervals_and_tokens_as_published():
    """The fit to Table 4 of arXiv 2503.09799; 1 % of the loss is 1.13 times the tokens at 135 M and 1.43 at 7 B."""
    assert loss.sites(135_000_000, 1) is loss.EXACT
    two, eight = (loss.sites(550_000_000, count) for count in (2, 8))
    assert math.log(eight.value) / math.log(two.value) == pytest.approx(3**1.55)
    assert (two.kind, loss.sites(1_000_000, 2).kind) == (loss.PUBLISHED, loss.PRIOR)
    assert loss.interval(550_000_000, 2, 30).value == pytest.approx(1.0)
    squared = math.log(loss.interval(550_000_000, 2, 900).value)
    assert squared == pytest.approx(math.log(two.value))
    with pytest.raises(ValueError, match="sync_every: expected 2 or more, got 1: one step is data parallel training"):
        loss.interval(10**9, 2, 1)
    assert loss.tokens(1.01, 135_000_000, 20 * 135e6) == pytest.approx(1.13, abs=0.005)
    assert loss.tokens(1.01, 7_000_000_000, 20 * 7e9) == pytest.approx(1.43, abs=0.01)
    assert (loss.tokens(0.98, 10**9, 1e10), loss.tokens(3.0, 10**9, 1e10)) == (1.0, math.inf)
    product = loss.product(two, loss.EXACT, loss.measured("ddp", "sym4"))
    assert product.value == pytest.approx(two.value * 1.0028) and product.kind == loss.PUBLISHED
    assert product.source == "Table 4 of arXiv 2503.09799; results/ddp.json (0.8 M parameters)"


def test_the_table_and_what_it_recommends():
    made = lc.plan(trained(), link=link())
    text = str(made)
    assert all(way.name in text and way.loss.source in text for way in made.ways), text
    assert made.best.loss.value <= 1.01
    assert made.speed(made.best) >= max(map(made.speed, filter(made.fits, made.ways))) / 1.05
    assert f"> {made.best.name}" in text and made.best.lines in text
    assert not any(way.fine_tuning for way in made.ways)
    tuned = lc.plan(trained(), link=link(), fine_tuning=True)
    assert {"seed replay", "pipeline, changes in 2 bits"} <= {way.name for way in tuned.ways} and str(tuned)
    # A fast link, a small memory, a lower price, one rank.
    fast = lc.plan(trained(step_s=30.0), link=link("1gbit"))
    assert fast.best.name == "exact DDP" and "Do not compress: a step of exact DDP waits 1% for the link" in str(fast)
    narrow = lc.plan(trained(), link=link(sites=4), memory=6e7)
    assert narrow.best.method in ("fsdp", "pipeline", "subspace") and "exact DDP (memory)" in str(narrow)
    with pytest.raises(ValueError, match=r"plan: expected [\de+.]+ bytes a rank for .*, got 1e\+07"):
        str(lc.plan(trained(), link=link(), memory=1e7))
    assert lc.plan(trained(), link=link(), max_loss=1.0).best.loss.value == 1.0
    alone = lc.plan(trained(), link=link(sites=1))
    assert alone.best.name == "exact DDP" and alone.best.sent == 0
    with pytest.raises(ValueError, match="max_loss of 1 or more, and tokens and memory above 0, got 0.9, 2e"):
        lc.plan(trained(), link=link(), max_loss=0.9)
    with pytest.raises(ValueError, match="tokens: expected 0 or more, got -5"):
        trained(tokens=-5)
    strict = dataclasses.replace(made, ways=[way for way in made.ways if way.method == "ddp"], max_loss=1.0)
    assert strict.best.name == "exact DDP" and "No faster way fits the limits: a step" in str(strict), str(strict)
    # Stages are blocks, and sites of several ranks have fast links inside, which no pipeline is planned for.
    assert not any(way.method == "pipeline" for way in all_ways(trained(layers=3), link(sites=4)))
    assert not any(way.method == "pipeline" for way in all_ways(trained(), link(ranks_per_site=2)))
    with pytest.raises(ValueError, match="parameters: expected 1 or more, got 0"):
        trained(parameters=0)


def test_pasted_lines_are_python():
    for way in all_ways(trained(), link(sites=4, ranks_per_site=2)):
        compile(way.lines, way.name, "exec")
        assert way.memory > 0 and way.step_s > 0


class Decoder(nn.Module):
    """Three blocks with norms and a buffer that a forward pass changes."""

    def __init__(self, width=32):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(3)
        )
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x, y):
        self.calls += 1
        for block in self.blocks:
            x = x + block(x)
        return (x - y).square().mean()


def test_measuring_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    model, batch = Decoder(), (torch.randn(8, 32), torch.randn(8, 32))
    model(*batch).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    draw = torch.get_rng_state()
    made = lc.plan(model, batch, link=link())
    assert torch.equal(torch.get_rng_state(), draw)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
    found = made.training
    assert (found.parameters, found.layers, found.width, found.tokens) == (3 * (64 + 33 * 32), 3, 32, 0)
    assert (found.blocks, found.bits, found.unused) == ("model.blocks", 32, False)
    half = lc.plan(model.bfloat16(), tuple(x.bfloat16() for x in batch), link=link())
    assert half.training.bits == 16
    assert (half.ways[0].sent, half.ways[0].memory) == (made.ways[0].sent / 2, made.ways[0].memory / 2)
    assert found.matrices == [(32, 32)] * 3 and found.forward_s > 0 and found.update_s > 0
    four = found.codings["sym4:bucket=128"]
    assert 4 < four.bits < 5 and 0 < four.error < 0.3


def test_what_a_model_must_return():
    x = torch.randn(4, 32)
    with pytest.raises(ValueError, match=r"expected a scalar loss of the batch, got \(4, 32\): pass loss="):
        lc.plan(nn.Linear(32, 32), x, link=link())
    made = lc.plan(nn.Linear(32, 32), x, link=link(), loss=lambda model, batch: model(batch).square().mean())
    assert made.training.layers == 1
    for wrong in (lambda model, batch: 1.0, lambda model, batch: model(batch).mean().detach()):
        with pytest.raises(ValueError, match="expected a scalar loss of the batch"):
            lc.plan(nn.Linear(32, 32), x, link=link(), loss=wrong)
    model = nn.Linear(32, 32)
    model(x).sum().backward()
    with pytest.raises(ValueError, match="expected a scalar loss"):
        lc.plan(model, x, link=link())
    assert model.weight.grad is not None  # as it was
    with pytest.raises(ValueError, match="expected parameters that are trained, on a CPU"):
        lc.plan(model.requires_grad_(False), x, link=link())
    with pytest.raises(ValueError, match="expected finite gradients, got NaN or infinity"):
        lc.plan(nn.Linear(32, 32), x * math.inf, link=link(), loss=lambda model, batch: model(batch).mean())


def test_a_run_is_compared_with_its_plan():
    level, text = comparison(0.31, 0.3, 0.1, 0.2, 0.01)
    assert level == 20 and text.startswith("plan: a step takes 0.31 s, planned 0.3; its ops wait 0.2 s")
    level, text = comparison(0.9, 0.3, 0.1, 0.8, 0.04)
    assert level == 30 and text.endswith("its ops wait 0.8 s for other ranks, planned 0.2, and code 0.04 s")
    assert comparison(0.2, 0.3, 0.1, 0.1, 0.0)[0] == 30
