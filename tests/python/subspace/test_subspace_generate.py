"""lc.subspace.generate: token for token what the uncut decoder says, one message a token and boundary."""

from pathlib import Path

import pytest
import subspace_case as case
import torch
import torch.distributed as dist
from model import GPT, Config

import torch_lowcomm as lc
from torch_lowcomm.pipeline.boundary import FIRST_EDGE
from torch_lowcomm.pipeline.edge import Edge
from torch_lowcomm.subspace.basis import Basis

NEW = 20
GREEDY, SAMPLED = {}, {"temperature": 0.8, "seed": 3}
WAYS = {"greedy": GREEDY, "sampled": SAMPLED}


def _model(kind):
    return lc.subspace.constrain(case.gpt() if kind == "gpt" else case.family(kind), case.RANK)


@pytest.mark.parametrize("way", WAYS)
def test_one_process(way):
    model, ids = _model("gpt"), case.ids()
    tokens = lc.subspace.generate(lc.subspace.cut(model, 0, 1), ids, max_new_tokens=NEW, **WAYS[way])
    assert torch.equal(tokens, case.by_hand(model, ids, NEW, **WAYS[way]))
    assert torch.equal(tokens[:, : case.TIME], ids) and len(tokens.unique()) > 5
    assert model.training


@pytest.mark.on("pair", group={})
def test_as_the_page_writes_it(r):
    """docs/subspace.md: the stage that trains is the stage that generates, in its own group, and after a step of training too."""
    page = (Path(__file__).parents[3] / "docs" / "subspace.md").read_text()
    assert "`lc.subspace.generate(stage, prompts, max_new_tokens=100)`" in page and "stage = lc.pipeline.Stage(" in page
    group, index, count, device = dist.new_group([0, 1]), r.rank, r.size, torch.device("cpu")
    model, prompts = _model("gpt"), case.ids()
    part = lc.subspace.cut(model, index, count)
    stage = lc.pipeline.Stage(part, index, count, device, group=group)
    tokens = lc.subspace.generate(stage, prompts, max_new_tokens=NEW)
    assert torch.equal(tokens, case.by_hand(model, prompts, NEW))
    assert "send forward edge 253" in lc.stats()[group.group_name] or r.rank, (
        "in the stage's group, not the default one"
    )
    schedule = lc.pipeline.Schedule1F1B(stage, 3, loss_fn=lambda logits, y: logits.square().mean())
    lc.pipeline.step(schedule, prompts, target=prompts, ids=prompts)
    assert torch.equal(lc.subspace.generate(stage, prompts, max_new_tokens=NEW), tokens) and stage.submod.training
    lc.pipeline.step(schedule, prompts, target=prompts, ids=prompts)


def _count(r):
    """A token is a message a boundary, and one from the last stage to each other."""
    figures = lc.stats()[dist.group.WORLD.group_name]
    calls = {name: figure["calls"] for name, figure in figures.items() if isinstance(figure, dict) and "edge" in name}
    last = r.rank == r.size - 1
    want = {}
    if r.rank > 0:
        want["recv forward edge 253"] = 2 * NEW  # coefficients, and the prompts' checksum with them
    if not last:
        want["send forward edge 253"] = 2 * NEW
    want[f"{'send' if last else 'recv'} forward edge 254"] = NEW * (r.size - 1 if last else 1)
    assert calls == want, (calls, want)


@pytest.mark.on("quad", group={})
def test_four_stages(r):
    model, ids = _model("gpt"), case.ids()
    stage = lc.subspace.cut(model, r.rank, r.size)
    for i, options in enumerate((GREEDY, SAMPLED)):
        prompts = ids[: case.BATCH - i, : case.TIME - i]  # other shapes on the same edges
        tokens = lc.subspace.generate(stage, prompts, max_new_tokens=NEW, **options)
        assert torch.equal(tokens, case.by_hand(model, prompts, NEW, **options))
        if i == 0:
            _count(r)


@pytest.mark.parametrize("kind", ("gpt", *case.FAMILIES))
@torch.no_grad()
def test_caches_of_stages(kind):
    """Each stage keeps the keys and values of its own blocks: prompts, then one position a time, then three at once."""
    if kind != "gpt":
        pytest.importorskip("transformers", reason="no package transformers")
    model, ids = _model(kind), case.ids(96, time=16)
    stages = case.cuts(model, 3)
    case.expect_cached(stages, ids, case.logits(model, ids), (10, 1, 1, 3, 1))


@pytest.mark.later
@pytest.mark.on("pair", group={})
def test_more_tokens_than_chunks(r):
    """More tokens than an edge has chunks, in single precision."""
    torch.manual_seed(0)
    model = lc.subspace.constrain(GPT(Config(width=16, layers=2, heads=2, context=300)), 4)
    ids = case.ids(batch=2, time=4)
    tokens = lc.subspace.generate(lc.subspace.cut(model, r.rank, r.size), ids, max_new_tokens=280)
    assert torch.equal(tokens, case.by_hand(model, ids, 280))


CODED = {"fp32": (4, 2 * NEW), "bf16": (2, 2 * NEW), "minmax8:bucket=64": (4, NEW)}  # bytes a number, exact messages


@pytest.mark.parametrize("coefficients", CODED)
@pytest.mark.on("pair", group={}, alike=True)
def test_coded_coefficients(r, coefficients):
    model = _model("gpt").float()
    lc.subspace.generate(lc.subspace.cut(model, r.rank, r.size), case.ids(), max_new_tokens=2)  # another codec before
    lc.reset_stats()
    stage = lc.subspace.cut(model, r.rank, r.size, coefficients=coefficients)
    tokens = lc.subspace.generate(stage, case.ids(), max_new_tokens=NEW)
    assert tokens.shape == (case.BATCH, case.TIME + NEW)
    if r.rank == 0:
        sent = lc.stats()[dist.group.WORLD.group_name]["send forward edge 253"]
        size, exact = CODED[coefficients]
        numbers = case.BATCH * (case.TIME + NEW - 1) * case.RANK
        assert sent["raw_bytes"] == size * numbers + 8 * NEW  # and a checksum of the prompts
        assert (sent["calls"], sent["exact_calls"]) == (2 * NEW, exact)
    return tokens


@pytest.mark.parametrize("what", ["seed", "sigma", "basis"])
@pytest.mark.on("pair", group={})
def test_another_subspace_on_a_stage(r, what):
    options = {what: 1 + r.rank} if what in ("seed", "sigma") else {}
    stage = lc.subspace.cut(lc.subspace.constrain(case.gpt(), case.RANK, **options), r.rank, r.size)
    if r.rank == 1 and what == "basis":
        stage.subspace_basis.vectors.copy_(Basis(case.WIDTH, case.RANK, seed=9).vectors)
    with pytest.raises((ValueError, RuntimeError), match="stage 1 of 2: .*expected the basis, fixed part and kind"):
        lc.subspace.generate(stage, case.ids(), max_new_tokens=4)


@pytest.mark.on("pair", group={"timeout_s": 300})  # longer than the test's: nothing is heard by a time-out
def test_two_stages_generate_after_a_failure(r):
    """A mistake of one rank, or a stage that fails in the middle, is heard by all; the next call generates."""
    model, ids = lc.subspace.constrain(case.Positions(rows=40), case.RANK), case.ids()
    stage, want = lc.subspace.cut(model, r.rank, r.size), case.by_hand(model, ids, NEW)
    assert torch.equal(lc.subspace.generate(stage, ids, max_new_tokens=NEW), want)

    def fail(*_):
        if calls.append(0) or len(calls) == 4:
            raise KeyError("no such position")

    mistakes = [
        ("ids of one rank", {"ids": ids + 200 * (r.rank == 1)}, 1, r"stage 1 of \d: ids: expected 0...127"),
        (
            "other prompts",
            {"ids": case.ids(seed=r.rank)},
            None,
            "stage 1 of 2: .*expected the prompts of the stage before",
        ),
        (
            "a rank's number of tokens",
            {"max_new_tokens": 5 + (r.rank == 0)},
            None,
            "expected the prompts of the stage before",
        ),
        (
            "a temperature",
            {"temperature": -1.0 * (r.rank == r.size - 1)},
            r.size - 1,
            "temperature: expected 0 or more",
        ),
        ("ids of another type", {"ids": ids.tolist() if r.rank == 0 else ids}, 0, "ids: expected a tensor, got list"),
        ("a rank's seed", {"seed": "x" if r.rank == 1 else 0}, 1, "stage 1 of .: seed: expected an integer, got 'x'"),
        ("a block", {}, 0, "no such position"),
        (
            "too many tokens",
            {"max_new_tokens": 32},
            None,
            "max_new_tokens: expected at most 31 behind prompts of 10 tokens .* 40 positions, got 32",
        ),
    ]
    for what, options, culprit, said in mistakes:
        calls = []
        block = stage.get_submodule(f"blocks.{stage.block_numbers[0]}")
        hook = block.register_forward_pre_hook(fail) if what == "a block" and r.rank == culprit else None
        with pytest.raises((ValueError, TypeError, RuntimeError, KeyError), match=said):
            lc.subspace.generate(stage, **{"ids": ids, "max_new_tokens": NEW, **options})
        if hook is not None:
            hook.remove()
        assert torch.equal(lc.subspace.generate(stage, ids, max_new_tokens=NEW), want), what
    # As many as there are places.
    assert torch.equal(lc.subspace.generate(stage, ids, max_new_tokens=31), case.by_hand(model, ids, 31))


@pytest.mark.on("pair", group={})
def test_receives_are_posted_a_token_ahead(r):
    """A message's receive is posted before what causes it is sent: each costs one way, and a token a round trip a boundary."""
    model, ids = _model("gpt"), case.ids()
    stage, made = lc.subspace.cut(model, r.rank, r.size), []

    def noted(what, call):
        def wrapper(self, *args, **kwargs):
            made.append((what, self._side.number - FIRST_EDGE))
            return call(self, *args, **kwargs)

        return wrapper

    calls = {what: getattr(Edge, what) for what in ("post", "send", "recv")}
    for what, call in calls.items():
        setattr(Edge, what, noted(what, call))
    try:
        lc.subspace.generate(stage, ids, max_new_tokens=NEW)
    finally:
        for what, call in calls.items():
            setattr(Edge, what, call)
    # Of what a rank waits for it has posted the next message before it sends what the others need to make that one.
    waits, causes = ((254, 253), (253, 254))[stage.is_last]
    posted = received = sent = 0
    for what, edge in made:
        posted += (what, edge) == ("post", waits)
        received += (what, edge) == ("recv", waits)
        if (what, edge) == ("send", causes):
            sent += 1
            assert posted >= min(sent + stage.is_last, NEW), "the answer's receive was not posted"
            assert posted <= sent + 1, "one token ahead"
    assert posted == received == NEW and sent == NEW * (r.size - 1 if stage.is_last else 1)


class _NoCache(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.attention, self.down, self.block = block.attention, block.down, block

    def forward(self, x):
        return self.block(x)


def test_refusals():
    model, ids = _model("gpt"), case.ids()
    stage = lc.subspace.cut(model, 0, 1)
    for options, message in (
        ({"max_new_tokens": 0}, "max_new_tokens: expected 1 or more, got 0"),
        ({"max_new_tokens": 1, "temperature": -1.0}, "temperature: expected 0 or more, got -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            lc.subspace.generate(stage, ids, **options)
    with pytest.raises(ValueError, match="stage 0 of 1: ids: expected 0...127"):
        lc.subspace.generate(stage, ids + 128, max_new_tokens=1)
    with pytest.raises(ValueError, match="stage 0 of 1: ids: expected one token or more a prompt"):
        lc.subspace.generate(stage, ids[:, :0], max_new_tokens=1)
    with pytest.raises(TypeError, match="stage: expected an lc.pipeline.Stage of what .* got GPT"):
        lc.subspace.generate(model, ids, max_new_tokens=1)
    stage.get_submodule("blocks")["1"] = _NoCache(model.blocks[1])
    with pytest.raises(TypeError, match=r"blocks.1: expected _NoCache.forward\(x, cache=, start=\).* got forward\(x\)"):
        lc.subspace.generate(stage, ids, max_new_tokens=1)


@pytest.mark.on("pair", group={})
def test_another_rank(r):
    with pytest.raises(ValueError, match="group: expected 2 ranks, of which this is ., the stage's number"):
        lc.subspace.generate(lc.subspace.cut(_model("gpt"), 1 - r.rank, 2), case.ids(), max_new_tokens=1)
