"""lc.subspace.cut: stages of a decoder written by hand, uneven ones, their states, and what they refuse."""

import copy

import pytest
import subspace_case as case
import torch

import torch_lowcomm as lc


def test_what_travels():
    model, ids = case.constrained(torch.float32), case.ids()
    for coefficients, dtype in (
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("minmax8:bucket=128", torch.float32),
    ):
        first, last = case.cuts(model, 2, coefficients=coefficients)
        sent = first(ids)
        assert (sent.shape, sent.dtype) == ((case.BATCH, case.TIME, case.RANK), dtype)
        received = sent.detach().requires_grad_()
        last(received, ids=ids).sum().backward()
        assert (received.grad.shape, received.grad.dtype) == (sent.shape, dtype)
        assert first.message_codec == last.message_codec == (coefficients if ":" in coefficients else None)
        assert first.exact == last.exact == (coefficients == "fp32")
    assert case.cuts(case.constrained(), 2)[0](ids).dtype == torch.float64
    with pytest.raises(ValueError, match="unknown codec|codec"):
        lc.subspace.cut(model, 0, 2, coefficients="minmax99")


def test_another_boundary_is_not_exact(caplog):
    model, ids = case.gpt(), case.ids()
    with caplog.at_level("INFO", logger="torch_lowcomm.subspace"):
        first, last = case.cuts(model, 2, boundary=case.WHOLE)
    assert "cut: not exact: Whole(32), coefficients fp32" in caplog.text
    assert not first.exact
    assert case.apart(case.chain((first, last), ids), case.logits(model, ids)) < 1e-12
    other = lc.subspace.cut(model, 1, 2, boundary=case.Whole(16))
    checked, its_next, another = (stage.message_options["boundary"] for stage in (first, last, other))
    assert checked == its_next != another
    assert first.message_context(ids)["boundary"] != other.message_context(ids)["boundary"]


def test_half_precision_decoder():
    """The boundary's arithmetic is in single precision, the blocks' in theirs."""
    model, ids = case.constrained(torch.bfloat16, allow_half=True), case.ids()
    first, last = case.cuts(model, 2)
    assert first(ids).dtype == torch.float32
    whole, logits = case.logits(model, ids), case.chain((first, last), ids)
    assert logits.dtype == torch.bfloat16
    assert case.apart(logits, whole) < 0.05


@pytest.mark.parametrize("kind", ["buffer", "module"])
def test_frozen_positions(kind):
    model, ids = case.Positions(kind), case.ids()
    lc.subspace.constrain(model, case.RANK)
    assert model.subspace_parts.positions == "positions"
    stages = case.cuts(model, 3)
    whole = model(ids).detach()
    assert case.apart(case.chain(stages, ids), whole) < 1e-12
    assert [any("positions" in name for name in stage.state_dict()) for stage in stages] == [True, False, False]
    state = lc.subspace.merge_states(stage.state_dict() for stage in stages)
    for stage in stages:  # the table is the first one's, and no stage refuses the others' parts
        stage.load_state_dict(state)
    # Positions of a part begin where the part does, on both sides of a boundary.
    case.expect_cached(stages, ids, whole, (6, 1, 3))


def test_more_positions_than_the_table_has():
    first = lc.subspace.cut(lc.subspace.constrain(case.Positions(), case.RANK), 0, 2)
    with pytest.raises(ValueError, match="stage 0 of 2: ids: expected at most 48 places, the table's, got 49"):
        first(case.ids(time=49))


def test_autocast_is_told_once(caplog):
    first, ids = case.cuts(case.constrained(torch.float32), 2)[0], case.ids()
    with caplog.at_level("WARNING", logger="torch_lowcomm.subspace"):
        first(ids)
        assert not caplog.records
        with torch.autocast("cpu", torch.bfloat16):
            first(ids)
            first(ids)
    assert [record.message for record in caplog.records] == [
        "stage 0 of 2: not exact: autocast rounds what blocks add to the residual stream"
    ]


def test_stages_move_with_their_basis():
    model, ids = case.constrained(torch.float32), case.ids()
    first, last = (copy.deepcopy(stage).double() for stage in case.cuts(model, 2))
    assert first.subspace_basis is not model.subspace_basis and first.encode.basis is first.subspace_basis
    assert last.decode.basis is last.subspace_basis and last.subspace_basis.vectors.dtype == torch.float64
    assert first(ids).dtype == torch.float64 and last(first(ids), ids=ids).dtype == torch.float64


def test_check_of_a_stage():
    stages = case.cuts(case.constrained(), 3)
    assert [lc.subspace.check(stage) for stage in stages] == [[], [], []]
    with torch.no_grad():
        stages[1].get_submodule("blocks.2.down").weight[0, 0] += 1
    assert lc.subspace.check(stages[0]) == []
    assert [finding.module for finding in lc.subspace.check(stages[1])] == ["blocks.2.down.weight"]


@pytest.mark.parametrize(("before", "after"), [([1, 3], [2, 1, 1]), ([2, 1, 1], [4])])
def test_a_checkpoint_of_another_cut(before, after):
    """Stages of another cut go on to the bit: their losses and states are those of a decoder that was never cut anew."""
    trained, ids = case.constrained(), case.ids()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        trained(ids, ids).backward()
        optimizer.step()
    states = [stage.state_dict() for stage in case.cuts(trained, len(before), blocks=before)]
    merged = lc.subspace.merge_states(states)
    assert set(merged) == set(trained.state_dict())
    stages = case.cuts(case.constrained(), len(after), blocks=after)
    for stage in stages:
        assert str(stage.load_state_dict(merged)) == "<All keys matched successfully>"
    assert torch.equal(case.chain(stages, ids), case.chain(case.cuts(trained, len(after), blocks=after), ids))


def test_a_state_of_another_cut_is_named():
    first, last = case.cuts(case.constrained(), 2)
    message = r"stage 1 of 2 has blocks 2...3, the state dict has 0...1: the decoder was cut elsewhere; give it .*merge_states"
    with pytest.raises(ValueError, match=message):
        last.load_state_dict(first.state_dict())
    state = last.state_dict()
    last.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected key.*surplus"):
        last.load_state_dict(state | {"surplus": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*head.weight"):
        last.load_state_dict({name: value for name, value in state.items() if name != "head.weight"})
    other = lc.subspace.constrain(case.gpt(), case.RANK, seed=1)
    with pytest.raises(ValueError, match=r"subspace_basis.vectors: expected the same on all stages .*state 1"):
        lc.subspace.merge_states([first.state_dict(), case.cuts(other, 2)[1].state_dict()])
    with pytest.raises(ValueError, match=r"expected a state of \[seed, sigma, gaussian\]"):
        case.cuts(case.constrained(seed=3), 2)[0].load_state_dict(first.state_dict())


def _after(call):
    """`call` of the second of three stages, on what the first one sends."""

    def act(model, ids):
        first, middle, _ = case.cuts(model, 3)
        call(middle, first(ids), ids)

    return act


def _cut(*arguments, **options):
    return lambda model, ids: lc.subspace.cut(model, *arguments, **options)


def _constrain(*arguments, **options):
    return lambda *_: lc.subspace.constrain(case.gpt(), *arguments, **options)


SECOND, FIRST = "^stage 1 of 3: ", "^stage 0 of 2: ids: expected "
VALUES = [
    (_after(lambda s, x, ids: s(x)), SECOND + "expected ids=, the tokens of the micro-batch, on every stage, got none"),
    (_after(lambda s, x, ids: s(x, ids=ids + 125)), SECOND + r"ids: expected 0...127, got \d+ to 2\d\d"),
    (_after(lambda s, x, ids: s(x, ids=ids - 128)), SECOND + r"ids: expected 0...127, got -1\d\d to -"),
    (
        _after(lambda s, x, ids: s(x, ids=ids.float())),
        SECOND + r"ids: expected integers \[batch, time\], got torch.float32 \[3, 10\]",
    ),
    (
        _after(lambda s, x, ids: s(x, ids=ids[0])),
        SECOND + r"ids: expected integers \[batch, time\], got torch.int64 \[10\]",
    ),
    (
        _after(lambda s, x, ids: s(x, ids=ids[:, 1:])),
        SECOND + r"expected coefficients \[3, 9, rank\] for the ids, got \[3, 10, 8\]",
    ),
    (
        _after(lambda s, x, ids: s(x[..., 1:], ids=ids)),
        SECOND + r"expected 8 coefficients a token, this stage's rank, got 7",
    ),
    (
        lambda model, ids: case.cuts(model, 2)[0](ids, ids=ids[:, 1:]),
        FIRST + r"the shape of x, \[3, 10\], got \[3, 9\]",
    ),
    (lambda model, ids: case.cuts(model, 2)[0](ids + 100), FIRST + r"0...127, got \d+ to 2\d\d"),
    (_cut(2, 2), r"index: expected one of 0...1, got 2"),
    (_cut(0, 5), r"count: expected 1...4, the number of blocks, got 5"),
    (_cut(0, 0), r"count: expected 1...4, the number of blocks, got 0"),
    (_cut(0, 2, blocks=[1, 2]), r"blocks: expected 2 numbers above 0 that add up to 4, got \[1, 2\]"),
    (_cut(0, 2, blocks=[0, 4]), r"blocks: expected 2 numbers above 0 .*\[0, 4\]"),
    (_cut(0, 3, blocks=[2, 2]), r"blocks: expected 3 numbers above 0"),
    (
        _constrain(8, seed=2**64),
        "seed: expected 0 or more, below 2.64, got 18446744073709551616",
    ),
    (lambda model, _: lc.subspace.constrain(model, case.RANK), "expected a decoder that is not constrained"),
    *((_constrain(rank), f"rank: expected one of 1...32, the width, got {rank}") for rank in (0, case.WIDTH + 1)),
    *(
        (_constrain(8, free_blocks=free), f"free_blocks: expected one of 0...3, fewer than .*, got {free}: a boundary")
        for free in (-1, case.LAYERS)
    ),
]
TYPES = [
    (lambda model, _: lc.subspace.cut(lc.subspace.cut(model, 1, 2), 0, 2), "a whole decoder, got stage 1 of 2"),
    (_cut(0, 2, coefficients=None), "coefficients: expected 'fp32', 'bf16' or a codec, got None"),
    (_cut(0, 2, boundary="x"), "boundary: expected a Boundary or None, got 'x'"),
    (_cut(0.0, 2), "index: expected an integer, got 0.0"),
    (_cut(0, 2, blocks=[2.0, 2]), "blocks: expected an integer, got 2.0"),
    (_constrain(8.0), "rank: expected an integer, got 8.0"),
    (_constrain(8, seed=None), "seed: expected an integer, got None"),
    *((_constrain(8, free_blocks=free), "free_blocks: expected an integer") for free in (1.0, True, None)),
    (
        lambda *_: lc.subspace.check(case.gpt()),
        "expected a model that lc.subspace.constrain has returned, got GPT",
    ),
    (
        lambda *_: lc.subspace.cut(case.gpt(), 0, 2),
        "expected a model that lc.subspace.constrain has returned, got GPT",
    ),
]


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_mistakes_are_named(error):
    for act, message in VALUES if error is ValueError else TYPES:
        with pytest.raises(error, match=message):
            act(case.constrained(), case.ids())
