"""Two stages that were made differently: both name it before a tensor is sent, and go on in the same group."""

import os
import stat
from pathlib import Path

import pytest
import stages_case as case
import torch
import torch.distributed as dist
from torch.distributed import pipelining

import torch_lowcomm as lc

CPU = torch.device("cpu")


def _expect_both_name(r, schedule, name, values):
    """The step raises before a tensor is sent."""
    mine, other = values[r.rank], values[1 - r.rank]
    said = f"boundary 0: {name}: expected the same on both sides, rank {r.rank} has {mine!r}, rank {1 - r.rank} has {other!r}"
    with pytest.raises(ValueError) as failure:
        case.step(schedule)
    assert said in str(failure.value), failure.value
    for op in next(iter(lc.stats().values())):
        assert not op.startswith("send forward"), op


def _static(rank, tensor):
    """A stage that was told its tensors, which torch then neither asks for nor compares."""
    whole = torch.empty(case.ROWS // case.MICRO, 3, case.WIDTH)
    given = {"input_args": whole if rank == 0 else tensor, "output_args": tensor if rank == 0 else whole}
    stage = lc.pipeline.Stage(case.module(rank), rank, 2, CPU, **given)
    return pipelining.ScheduleGPipe(stage, case.MICRO, loss_fn=case.loss)


@pytest.mark.on("pair", group={"timeout_s": 300})  # longer than the test's: nobody waits for it
def test_stages_that_were_made_differently_are_named_on_both_sides(r):
    """A pair of each kind after the other, then one without a difference, all in one group."""
    rows, mine = case.ROWS // case.MICRO, r.rank

    def tensors(shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    like = tensors((rows, 3, case.WIDTH))
    for other, said in (
        (tensors((rows, 3, 12)), f"float32[{rows}, 3, 12]"),
        (tensors((rows, case.WIDTH, 3)), f"float32[{rows}, {case.WIDTH}, 3]"),  # as many elements
        (tensors((rows, 3, case.WIDTH), torch.bfloat16), f"bfloat16[{rows}, 3, {case.WIDTH}]"),
    ):
        values = (f"float32[{rows}, 3, {case.WIDTH}]", said)
        _expect_both_name(r, _static(mine, (like, other)[mine]), "tensors", values)

    def schedule(kind=pipelining.ScheduleGPipe, micro=case.MICRO, stages=2, **options):
        stage = lc.pipeline.Stage(case.module(mine), mine, stages, CPU, **options)
        return kind(stage, micro, loss_fn=case.loss)

    kinds = (pipelining.ScheduleGPipe, pipelining.Schedule1F1B)
    _expect_both_name(r, schedule(kinds[mine]), "schedule", ("ScheduleGPipe", "Schedule1F1B"))
    _expect_both_name(r, schedule(micro=(4, 2)[mine]), "micro-batches", ("4", "2"))
    _expect_both_name(r, schedule(stages=(2, 3)[mine]), "stages", ("2", "3"))
    slot = 3 * case.WIDTH * 2
    for options, said in (
        ({"store": "bf16"}, "store=bf16, max_bytes=None, overflow=stateless"),
        ({"max_bytes": 9 * slot}, f"store=fp16, max_bytes={9 * slot}, overflow=stateless"),
        ({"overflow": None}, "store=fp16, max_bytes=None, overflow=None"),
    ):
        cache = lc.pipeline.Cache(**({}, options)[mine])
        values = ("store=fp16, max_bytes=None, overflow=stateless", said)
        _expect_both_name(r, schedule(cache=cache, **case.CODED), "cache", values)
        assert cache.bytes == 0
    one = (lc.pipeline.Cache(), None)[mine]
    values = ("store=fp16, max_bytes=None, overflow=stateless", "none")
    _expect_both_name(r, schedule(cache=one, **case.CODED), "cache", values)
    _expect_both_name(r, schedule(unit=("token", "sample")[mine]), "unit", ("token", "sample"))
    assert len(case.step(_static(mine, like))) == case.MICRO * mine
    cache = lc.pipeline.Cache()
    assert len(case.step(schedule(cache=cache, **case.CODED))) == case.MICRO * mine
    assert len(case.equal_rows(cache.slots.rows(0, mine == 0))) == case.ROWS


@case.TELLS_SHAPES
@pytest.mark.on("pair", group={"timeout_s": 300})
def test_a_batch_of_another_size_on_one_side_is_named_on_both(r):
    """A batch of other rows on one side, after the shapes were told: both sides raise, and go on after a reset."""
    schedule, _ = case.build(r.rank, 2, "GPipe")
    case.step(schedule)
    rows = case.ROWS // 2 if r.rank == 0 else case.ROWS
    with pytest.raises(dist.DistBackendError, match="elements differs: rank 0 has '144', rank 1 has '288'"):
        case.step(schedule, case.batch()[0][:rows], samples=range(rows))
    lc.pipeline.reset(schedule)
    assert len(case.step(schedule)) == case.MICRO * r.rank
    dist.destroy_process_group()


@pytest.mark.on("pair", group={"timeout_s": 300})
def test_sample_numbers_that_are_none(r):
    """Sample numbers that are none, as integers and as tensors: refused before anything is sent, on every rank."""
    cache = lc.pipeline.Cache()
    schedule, _ = case.build(r.rank, 2, "GPipe", cache=cache, **case.CODED)
    others = list(range(1, case.ROWS))
    for samples, least, most in (
        ([-1, *others], -1, case.ROWS - 1),
        (torch.tensor([-(2**63), *others]), -(2**63), case.ROWS - 1),
        ([2**63, *others], 1, 2**63),
    ):
        with pytest.raises(ValueError, match=rf"samples: expected numbers of 0\.\.\.2\^63 - 1, got {least} to {most}"):
            case.step(schedule, samples=samples)
    case.step(schedule, samples=[2**63 - 1, *others])
    assert max(row[1] for row in case.equal_rows(cache.slots.rows(0, r.rank == 0))) == 2**63 - 1


@pytest.mark.on(2, timeout=120)
def test_files_that_became_read_only(r):
    """Files of rank 0 that nobody may write to any more: the open cache goes on; a later one names them, and another goes on."""
    if os.geteuid() == 0:  # root may write to everything
        Path(r.folder).chmod(0o711)
        r.path(f"cache{r.rank}").mkdir(mode=0o777)
        r.path(f"cache{r.rank}").chmod(0o777)
        r.init("lowcomm", timeout_s=300)
        os.seteuid(65534)
    else:
        r.init("lowcomm", timeout_s=300)
    folder = r.path(f"cache{r.rank}")
    cache = lc.pipeline.Cache(folder=folder)
    schedule, _ = case.build(r.rank, 2, "1F1B", cache=cache, **case.CODED)
    case.step(schedule)
    (file,) = folder.glob("*.slots")
    if r.rank == 0:
        file.chmod(stat.S_IRUSR)
    case.step(schedule)
    cache.close()
    if r.rank == 0:
        with pytest.raises(PermissionError, match=str(file)):
            lc.pipeline.Cache(folder=folder)
        folder = folder / "another"
    cache = lc.pipeline.Cache(folder=folder)
    schedule, _ = case.build(r.rank, 2, "1F1B", cache=cache, **case.CODED)
    case.step(schedule)
    assert [row[2] for row in case.equal_rows(cache.slots.rows(0, r.rank == 0))] == [1] * case.ROWS, (
        "first visits on both sides"
    )
    cache.close()
    dist.destroy_process_group()
    if os.getuid() == 0:
        os.seteuid(0)  # to leave the answer
