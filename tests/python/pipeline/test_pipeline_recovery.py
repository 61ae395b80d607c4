"""After a step that failed: every rank hears why, nothing is under way, caches are equal, and training goes on."""

import datetime
import itertools
import os
import signal

import pytest
import stages_case as case
import torch
import torch.distributed as dist

import torch_lowcomm as lc


class _Spoiler(torch.nn.Module):
    """A stage that fails where it is told to: (what, micro-batch)."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage
        self.fault = None

    def begin(self, fault):
        self.fault, self.count = fault, 0

    def forward(self, x):
        what, chunk = self.fault or ("", -1)
        here = self.count == chunk
        self.count += 1
        if what == "error" and here:
            raise KeyError("no such token")
        x = case.Spoil.apply(x, False, what == "gradient" and here)
        return case.Spoil.apply(self.stage(x), what == "activation" and here, False)


def _slots(cache, boundary, sends):
    return [tuple(row) for row in cache.slots.rows(boundary, sends).tolist()]


def _expect_equal_caches(r, cache):
    sides = case.gathered([_slots(cache, r.rank, True), _slots(cache, r.rank - 1, False)])
    for (sent, _), (_, received) in itertools.pairwise(sides):
        assert sent == received


@pytest.mark.on("pair", "quad", group={"timeout_s": 300})  # longer than the test's: nothing here is heard by a time-out
def test_all_stages_go_on_in_the_same_group(r):
    name = {2: "GPipe", 4: "1F1B"}[r.size]
    cache = lc.pipeline.Cache()
    schedule, (stage,) = case.build(r.rank, r.size, name, cache=cache, **case.CODED)
    spoiler = stage.submod = _Spoiler(stage.submod)

    def step(fault=None):
        spoiler.begin(fault)
        return case.step(schedule)

    step()
    source = r.size // 2 - 1  # whose activations are spoilt; the stage behind it spoils its gradients
    for what in ("activation", "gradient", "error"):
        for chunk in (0, case.MICRO - 1):
            mine = (what, chunk) if r.rank == source + (what == "gradient") else None
            with pytest.raises((ValueError, RuntimeError)) as failure:
                step(mine)
                step()  # a rank whose part is over hears of it in its next step
            if what == "error" and mine:  # torch's error, as it is
                assert isinstance(failure.value.__cause__, KeyError)
            else:
                said = str(failure.value).lower()
                cause = "no such token" if what == "error" else "nan"
                for part in (f"micro-batch {chunk}", f"stage {r.rank}", cause):
                    assert part in said, said
            with pytest.raises(RuntimeError, match="call lc.pipeline.reset"):
                step()
            lc.pipeline.reset(schedule)
            _expect_equal_caches(r, cache)
            (record,) = lc.flight_record().values()
            assert not [op for op in record["ops"] if op["state"] == "under way" and "channel" in op["op"]]
            losses = step()
            assert len(losses) == (case.MICRO if r.rank == r.size - 1 else 0)
            assert all(loss.isfinite() for loss in losses)
            _expect_equal_caches(r, cache)
            assert len(cache.slots.rows(0, True)) == (case.ROWS if r.rank == 0 else 0)
    for side in ("_receives", "_sends", "_posted"):
        assert not getattr(stage.messages, side), "after a step nothing is under way"


@pytest.mark.on("pair", group={"timeout_s": 300})
def test_stages_that_share_a_rank_go_on(r):
    """Stages that share a rank fail together."""
    cache = lc.pipeline.Cache()
    schedule, _ = case.build(r.rank, r.size, "Interleaved1F1B", cache=cache, **case.CODED)
    spoilt, _ = case.batch()
    spoilt[-1, 0, 0] = float("nan")
    for _ in range(2):
        case.step(schedule)
        with pytest.raises((ValueError, RuntimeError), match="(?is)micro-batch 3.*nan"):
            case.step(schedule, spoilt)
            case.step(schedule)
        lc.pipeline.reset(schedule)
    case.step(schedule)
    rows = case.gathered({(b, s): cache.slots.rows(b, s).tolist() for b in range(3) for s in (True, False)})
    for boundary in range(3):
        sender = boundary % 2
        assert rows[sender][boundary, True] == rows[1 - sender][boundary, False]
        assert len(rows[sender][boundary, True]) == case.ROWS


@pytest.mark.later
@pytest.mark.parametrize(
    "victim", [pytest.param(v, marks=pytest.mark.on(3, timeout=120, kill_last=[v])) for v in (0, 1)]
)
def test_a_stopped_rank_is_named_at_the_deadline(r, victim):
    """The victim stops in the middle of a step: the other hears of it at the deadline, and goes on with rank 2 in its place."""
    cache = lc.pipeline.Cache()
    me = victim if r.rank == 2 else r.rank

    def begin(number):
        store = dist.FileStore(str(r.path(f"group{number}")), 2)
        timeout = datetime.timedelta(seconds=60)
        dist.init_process_group("lowcomm", store=store, rank=me, world_size=2, timeout=timeout)
        return case.build(me, 2, "GPipe", cache=cache, **case.CODED)

    if r.rank < 2:
        schedule, (stage,) = begin(1)
        case.step(schedule)
        r.set_deadline(3)
        if me == victim:
            stage.submod[2].register_forward_pre_hook(lambda module, inputs: os.kill(os.getpid(), signal.SIGSTOP))
        way = "forward" if victim == 0 else "backward"
        with pytest.raises(
            dist.DistBackendError,
            match=rf"(?i)stage {me}: .*recv of channel.*{way} boundary 0.*timed out waiting 3000 ?ms",
        ):
            case.step(schedule)
        dist.destroy_process_group()
    schedule, _ = begin(2)
    case.step(schedule)
    rows = case.equal_rows(cache.slots.rows(0, me == 0))
    assert [row[2] for row in rows] == [1] * case.ROWS, "what one side alone remembered is a first visit"
    dist.destroy_process_group()


@pytest.mark.later
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.on(3, timeout=120)
def test_a_failure_before_the_first_message_is_heard(r, culprit):
    """A module that fails as torch's stages tell each other their shapes is heard at once and on all ranks."""
    r.init("lowcomm", timeout_s=300)
    schedule, (stage,) = case.build(r.rank, r.size, "1F1B", **case.CODED)
    right = stage.submod[2]
    if r.rank == culprit:
        stage.submod[2] = torch.nn.Linear(5, 7)
    x, y = case.batch()
    with pytest.raises((RuntimeError, dist.DistBackendError)) as failure:
        case.step(schedule)
    if r.rank != culprit:
        assert isinstance(failure.value, dist.DistBackendError) and f"rank {culprit}" in str(failure.value), (
            failure.value
        )
    if stage.tells_shapes:  # else the group has ended
        lc.pipeline.reset(schedule)
        stage.submod[2] = right
        lc.pipeline.step(type(schedule)(stage, case.MICRO, loss_fn=case.loss), x, target=y)
        dist.barrier()
