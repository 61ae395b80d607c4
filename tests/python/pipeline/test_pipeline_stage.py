"""lc.pipeline.Stage under torch's schedules: exact messages give one model's gradients, coded ones come near, caches agree."""

import pytest
import stages_case as case
import torch
import torch.distributed as dist

import torch_lowcomm as lc


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(*p.values, torch.float32, marks=p.marks) for p in case.NAMES]
    + [("1F1B", torch.bfloat16), ("1F1B", torch.float16)],
    ids=str,
)
@pytest.mark.on("pair", group={})
def test_exact_stages_have_the_whole_models_gradients(r, name, dtype):
    schedule, stages = case.build(r.rank, r.size, name, micro=case.MICRO, dtype=dtype)
    x, y = (part.to(dtype) for part in case.batch())
    want = case.exact_gradients(r.size * case.SCHEDULES[name][1], x, y, dtype)
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        lc.pipeline.step(schedule, x, target=y)
        for stage in stages:
            for mine, whole in zip(stage.submod.parameters(), want[stage.stage_index], strict=True):
                torch.testing.assert_close(mine.grad, whole, rtol=1e-4 if dtype == torch.float32 else 0.1, atol=1e-5)
    sent = lc.stats()
    group = next(iter(sent.values()))
    sends = {op: figures for op, figures in group.items() if op.startswith(("send forward", "send backward"))}
    sides = {(s.stage_index - way, way) for s in stages for way in (0, 1)}
    names = {f"send {'backward' if way else 'forward'} boundary {b}" for b, way in sides}
    assert sends and sends.keys() <= names, sends.keys()
    for figures in sends.values():
        assert figures["calls"] == figures["exact_calls"] == 2 * case.MICRO
        assert figures["wire_bytes"] > figures["raw_bytes"] > 0
        assert figures["samples"] is None


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
@pytest.mark.on("pair", group={})
def test_exact_stages_have_the_bits_of_torchs(r, name):
    """The bits of torch's own stage over the same backend."""
    from torch.distributed.pipelining import PipelineStage

    x, y = case.batch()
    found = []
    for stage in (None, PipelineStage):
        schedule, stages = case.build(r.rank, r.size, name, stage=stage)
        if stage is None:
            case.step(schedule)
        else:
            first = any(s.is_first for s in stages)
            last = {"target": y} if any(s.is_last for s in stages) else {}
            schedule.step(*([x] if first else []), **last)
        found.append(case.gradients(stages))
    for mine, torchs in zip(*found, strict=True):
        assert torch.equal(mine, torchs)


PAIR = pytest.mark.on("pair", group={})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(*p.values, torch.float32, marks=[*p.marks, PAIR, pytest.mark.later])
            for p in case.NAMES
            if p.values[0] in ("Interleaved1F1B", *case.V_SHAPED)
        ),
        *(pytest.param("1F1B", dtype, marks=PAIR) for dtype in (torch.float16, torch.bfloat16)),
        pytest.param("1F1B", torch.float32, marks=pytest.mark.on("quad", group={})),
    ],
    ids=str,
)
def test_both_sides_remember_the_same_after_three_epochs(r, name, dtype):
    cache = lc.pipeline.Cache()
    schedule, stages = case.build(
        r.rank, r.size, name, cache=cache, dtype=dtype, first_visit="minmax8:bucket=128", **case.CODED
    )
    optimizer = torch.optim.SGD([p for s in stages for p in s.submod.parameters()], lr=0.05)
    for samples, x, y in lc.pipeline.batches(case.data(), batch=case.ROWS, seed=1, epochs=3):
        lc.pipeline.step(schedule, x.to(dtype), samples=samples, target=y.to(dtype))
        optimizer.step()
        optimizer.zero_grad()
    boundaries = r.size * case.SCHEDULES[name][1] - 1
    ends = {(b, sends): cache.slots.rows(b, sends).tolist() for b in range(boundaries) for sends in (True, False)}
    sides = {end: rows for end, rows in ends.items() if rows}
    gathered = case.gathered(sides)
    both = {key: rows for rank in gathered for key, rows in rank.items()}
    messages = [b for b in range(boundaries) if (b, True) in both]
    assert messages and all((b, False) in both for b in messages)
    for boundary in messages:
        assert both[boundary, True] == both[boundary, False]
        assert [row[1] for row in both[boundary, True]] == list(range(case.SAMPLES))
        assert all(row[2] == 3 for row in both[boundary, True]), "three visits"
    local = sum(len(rows) for rows in sides.values()) * 3 * case.WIDTH * 2
    assert cache.bytes == local


@pytest.mark.on("pair", group={})
def test_evaluation_between_steps(r):
    """eval() between steps is exact and leaves the cache alone."""
    cache = lc.pipeline.Cache()
    schedule, _ = case.build(r.rank, r.size, "GPipe", cache=cache, **case.CODED)
    x, y = case.batch()
    case.step(schedule)
    before = cache.slots.rows(0, r.rank == 0)
    result = lc.pipeline.evaluate(schedule, x, target=y)
    if r.rank == 1:
        torch.testing.assert_close(result, case.whole(2)(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(cache.slots.rows(0, r.rank == 0), before)
    case.step(schedule)
    lc.pipeline.evaluate(schedule, x, target=y)
    dist.destroy_process_group()  # at once: nothing of the evaluation is cut off


@pytest.mark.on("pair", group={})
def test_evaluation_by_a_codec(r):
    """`evaluate=` codes the activations of eval() alone, by themselves and with or without a cache."""
    x, y = case.batch()
    for cache in (None, lc.pipeline.Cache()):
        coded = {} if cache is None else {"cache": cache, **case.CODED}
        schedule, _ = case.build(r.rank, r.size, "GPipe", evaluate="sym8:bucket=128", **coded)
        case.step(schedule)
        lc.reset_stats()
        before = None if cache is None else cache.slots.rows(0, r.rank == 0)
        result = lc.pipeline.evaluate(schedule, x, target=y)
        if r.rank == 1:
            error = (result - case.whole(2)(x)).norm() / case.whole(2)(x).norm()
            assert 1e-4 < error < 0.03, error  # 8 bits of activations below 1
        else:
            (figures,) = lc.stats().values()
            sent = figures["send forward boundary 0"]
            assert (sent["calls"], sent["exact_calls"], sent["samples"]) == (case.MICRO, 0, None)
            assert "recv backward boundary 0" not in figures
        if cache is not None:
            assert torch.equal(cache.slots.rows(0, r.rank == 0), before)
            case.step(schedule)


@pytest.mark.parametrize("name", case.NAMES)
@pytest.mark.on("pair", group={})
def test_coded_stages_come_near(r, name):
    """Gradients through 8 bits, at first visits and as changes, come near the exact ones."""
    x, y = case.batch()
    want = case.exact_gradients(r.size * case.SCHEDULES[name][1], x, y, torch.float32)
    options = {"forward": "sym8:bucket=128", "backward": "sym8:bucket=128", "cache": lc.pipeline.Cache()}
    schedule, stages = case.build(r.rank, r.size, name, **options)
    for _ in range(3):
        for stage in stages:
            stage.submod.zero_grad()
        case.step(schedule)
        for stage in stages:
            for mine, exact in zip(stage.submod.parameters(), want[stage.stage_index], strict=True):
                assert (mine.grad - exact).norm() < 0.03 * exact.norm()
    for op, figures in next(iter(lc.stats().values())).items():
        if op.startswith("send forward"):
            assert figures["samples"]["mean_change"] < 0.02 * figures["samples"]["mean_value"], "nothing has moved"


class _Several(torch.nn.Module):
    """To the next stage: a tensor that needs a gradient and is not contiguous, one of numbers, and one of another shape."""

    def forward(self, x):
        return (2 * x).transpose(1, 2), (x > 0).sum(2), x.mean(2)


class _Last(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, numbers, means):
        return (x.transpose(1, 2) * numbers[..., None] * self.weight[:, None]) + means[..., None]


@case.INTEGERS_TOO
@pytest.mark.parametrize("coded", [False, True], ids=["exact", "coded"])
@pytest.mark.on("pair", group={})
def test_several_tensors_at_a_boundary(r, coded):
    from torch.distributed.pipelining import ScheduleGPipe

    x, y = case.batch()
    first = torch.nn.Sequential(torch.nn.Linear(case.WIDTH, case.WIDTH), _Several())
    with torch.no_grad():
        first[0].weight.copy_(torch.eye(case.WIDTH))
        first[0].bias.zero_()
    cache = lc.pipeline.Cache() if coded else None
    # By default a unit would be a token, of 3 elements, which travel exact.
    coding = {"forward": "sym8:bucket=128", "backward": "sym8:bucket=128", "unit": "message"}
    options = {"cache": cache, **coding} if coded else {}
    stage = lc.pipeline.Stage(first if r.rank == 0 else _Last(), r.rank, 2, torch.device("cpu"), **options)
    schedule = ScheduleGPipe(stage, case.MICRO, loss_fn=case.loss)
    visits = 3 if coded else 1
    for _ in range(visits):
        losses = case.step(schedule)
        if r.rank == 1:
            want = case.loss(2 * x * (x > 0).sum(2)[..., None] + x.mean(2)[..., None], y)
            close = {"rtol": 0.01, "atol": 0.0} if coded else {}
            torch.testing.assert_close(torch.stack(losses).mean(), want, **close)
    if r.rank == 1:
        assert stage.submod.weight.grad.abs().sum() > 0
    else:
        assert first[0].weight.grad.abs().sum() > 0
        assert first[0].bias.grad.abs().sum() > 0
    if coded:  # numbers travel exact and are not remembered
        rows = case.equal_rows(cache.slots.rows(0, r.rank == 0))
        of = [(0, sample, visits) for sample in range(case.ROWS)] + [(2, sample, visits) for sample in range(case.ROWS)]
        assert [tuple(row[:3]) for row in rows] == of
        assert cache.bytes == case.ROWS * (3 * case.WIDTH + 3) * 2


@pytest.mark.parametrize(("window", "expected"), [(None, case.MICRO - 1), (1, 0), (2, 1)])
@pytest.mark.on("pair", group={})
def test_receives_are_posted_ahead(r, window, expected):
    """When the second stage computes its first micro-batch, the receives of later ones have been posted."""
    schedule, (stage,) = case.build(r.rank, r.size, "GPipe", window=window)
    case.step(schedule)  # torch infers shapes first
    posted = []

    def count(module, inputs):
        (record,) = lc.flight_record().values()
        posted.append(
            sum(op["op"].startswith("recv of channel") and op["state"] == "under way" for op in record["ops"])
        )

    stage.submod.register_forward_pre_hook(count)
    case.step(schedule)
    if r.rank == 1:
        assert posted[0] == expected, posted
