"""Caches in files: slots read ahead and written behind, and what a disk, a kill or a restart does to them."""

import contextlib
import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import ranks
import stages_case as case
import torch
import torch.distributed as dist

import torch_lowcomm as lc

SLOT = 3 * case.WIDTH * 2


def _trained(r, cache, how):
    """Weights after epochs of batches that share samples, whose next ones are told with a step, by `batches` or not."""
    schedule, (stage,) = case.build(r.rank, r.size, "1F1B", cache=cache, **case.CODED)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    if how == "batches":  # one batch, again and again
        batches = lc.pipeline.batches(case.data()[: case.ROWS], batch=case.ROWS, epochs=5, seed=1, cache=cache)
    else:
        batches = list(lc.pipeline.batches(case.data(), batch=case.ROWS, epochs=3, seed=1))
        batches.insert(1, batches[0])  # the same samples in two batches that follow each other
    for number, (samples, x, y) in enumerate(batches):
        if how == "step" and number + 1 < len(batches):
            cache.read_ahead(batches[number + 1][0])
        lc.pipeline.step(schedule, x, samples=samples, target=y)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in stage.submod.parameters()]


@pytest.mark.parametrize(
    ("how", "store"), [("step", "fp16"), ("batches", "fp16"), ("neither", "fp16"), ("step", "sym8:bucket=128")]
)
@pytest.mark.on("pair", group={})
def test_slots_read_ahead_change_no_bit(r, how, store):
    ram = lc.pipeline.Cache(store=store)
    want = _trained(r, ram, how)
    cache = lc.pipeline.Cache(store=store, folder=Path(r.folder) / f"{how}{r.rank}")
    got = _trained(r, cache, how)
    assert all(map(torch.equal, got, want))
    rows = cache.slots.rows(0, r.rank == 0)
    assert torch.equal(rows, ram.slots.rows(0, r.rank == 0))
    case.equal_rows(cache.slots.rows(0, r.rank == 0))
    stats = cache.stats()
    assert stats["seen"] == stats["read_ahead"] + stats["read_late"]
    assert (stats["read_ahead"] > 0) == (how != "neither")
    cache.close()
    again = lc.pipeline.Cache(store=store, folder=Path(r.folder) / f"{how}{r.rank}")
    assert torch.equal(again.slots.rows(0, r.rank == 0), rows)


@contextlib.contextmanager
def _disk(path, kib, options=""):
    """A small disk at `path`, for root alone."""
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k{options}", "tmpfs", str(path)]
    made = subprocess.run(mount, capture_output=True, text=True, timeout=10, check=False)
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=10)


def _expect_both_hear(r, culprit, schedule, said):
    """The step fails on both ranks; the culprit has the OSError, the other its text."""
    with pytest.raises((OSError, RuntimeError)) as failure:
        for _ in range(4):  # a disk may fail behind a step, which the next one says
            case.step(schedule)
    assert (type(failure.value) is OSError) == (r.rank == culprit), failure.value
    assert said in str(failure.value), failure.value
    assert "cache0" in str(failure.value), failure.value


def _disk_fault(r, fault, folder):
    r.init("lowcomm", timeout_s=300)
    folder = Path(folder) / "cache0" if r.rank == 0 else Path(r.folder) / "cache1"
    cache = lc.pipeline.Cache(folder=folder)
    schedule, _ = case.build(r.rank, r.size, "1F1B", cache=cache, **case.CODED)

    if fault != "full":
        case.step(schedule)
    file = folder / "0.0.sent.slots"
    if r.rank == 0:
        cache.flush()
        if fault == "cut":
            os.truncate(file, 8192 + 3 * SLOT)
        elif fault == "corrupt":
            with file.open("r+b") as slots:
                slots.seek(8192 + 2 * 192 + 5)  # of the third slot
                slots.write(b"another")
        else:  # nothing is left but the header's page and the index's
            with contextlib.suppress(OSError), (folder.parent / "ballast").open("wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(1024))
            with (folder.parent / "ballast").open("r+b") as ballast:
                ballast.truncate(max(ballast.seek(0, os.SEEK_END) - 8192, 0))
    dist.barrier()
    reason = os.strerror(errno.ENOSPC) if fault == "full" else "expected 144 bytes with digest"
    _expect_both_hear(r, 0, schedule, reason)
    if r.rank == 0 and fault == "full":
        # A write of the failed step fails behind it, and is not to be an error of the next one.
        (memory,) = cache.slots._memories.values()
        memory.restore(0, 1, torch.zeros(memory.slot_bytes, dtype=torch.uint8))
        memory.table()
        (folder.parent / "ballast").unlink()
    lc.pipeline.reset(schedule)
    case.step(schedule)
    case.step(schedule)
    assert len(case.equal_rows(cache.slots.rows(0, r.rank == 0))) == case.ROWS
    if r.rank == 0:
        forgotten = cache.stats()["forgotten"]
        assert forgotten.get("not_written" if fault == "full" else "damaged", 0) > 0, forgotten
    dist.destroy_process_group()


@pytest.mark.parametrize("fault", ["cut", "corrupt"])
def test_a_file_that_is_spoilt_under_a_step(pair, tmp_path, fault):
    pair(_disk_fault, fault, str(tmp_path))


def test_a_full_disk(tmp_path):
    with _disk(tmp_path / "disk", 64) as disk:
        ranks.run_ranks(_disk_fault, 2, "full", str(disk), timeout=120)


def test_a_disk_that_cannot_be_written(tmp_path):
    with _disk(tmp_path / "disk", 64, ",ro") as disk, pytest.raises(OSError, match="Read-only file system"):
        lc.pipeline.Cache(folder=disk)


def _open_when_free(folder):
    """The cache of a folder that another process has open, once that has ended."""
    while True:  # until the job's deadline
        try:
            return lc.pipeline.Cache(folder=folder)
        except OSError as error:
            assert error.errno == errno.EWOULDBLOCK, error
            time.sleep(0.05)


def _kills(victim):
    return pytest.mark.on(3, alike=True, timeout=120, allow_exit={victim: -signal.SIGKILL})


@pytest.mark.later
@pytest.mark.parametrize("victim", [pytest.param(v, marks=_kills(v)) for v in (0, 1)])
def test_a_killed_rank_is_replaced_with_its_files(r, victim):
    """The victim is killed among the messages of its second step; rank 2 takes its place, with its files."""
    me = victim if r.rank == 2 else r.rank
    folder = r.path(f"cache{me}")

    def begin(number, cache):
        store = dist.FileStore(str(r.path(f"group{number}")), 2)
        dist.init_process_group("lowcomm", store=store, rank=me, world_size=2)
        return case.build(me, 2, "1F1B", cache=cache, **case.CODED)

    if r.rank < 2:
        cache = lc.pipeline.Cache(folder=folder)
        schedule, (stage,) = begin(1, cache)
        case.step(schedule)
        if me == victim:
            r.path("open").touch()
            micro_batches = iter(range(case.MICRO))

            def die(module, inputs):
                if next(micro_batches) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

            stage.submod.register_forward_pre_hook(die)
        with pytest.raises(dist.DistBackendError):
            case.step(schedule)
        dist.destroy_process_group()
    else:
        while not r.path("open").exists():
            time.sleep(0.05)
        cache = _open_when_free(folder)
    schedule, _ = begin(2, cache)
    case.step(schedule)
    rows = case.equal_rows(cache.slots.rows(0, me == 0))
    assert [row[1] for row in rows] == list(range(case.ROWS))
    versions = [row[2] for row in rows]
    stats = cache.stats()
    # What both sides have alike goes on, the others are first visits.
    assert set(versions) <= {1, 2, 3} and stats["first"] + stats["seen"] >= case.ROWS
    dist.destroy_process_group()
    return versions
