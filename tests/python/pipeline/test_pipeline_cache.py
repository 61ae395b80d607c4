"""Caches of lc.pipeline: stores of few bits, in files and bounded; what they save and how they are found again."""

import os
import signal
import time
from pathlib import Path

import pytest
import stages_case as case
import torch

import torch_lowcomm as lc


def _steps(r, cache, count, **options):
    """(rows, stages) after `count` steps on one batch."""
    schedule, stages = case.build(r.rank, r.size, "1F1B", cache=cache, **{**case.CODED, **options})
    for _ in range(count):
        case.step(schedule)
    return cache.slots.rows(0, r.rank == 0), stages


# A slot of [3, 24]: a scale a token, of which each is filled up to 32 elements; codes fill a word or two a lane.
@pytest.mark.parametrize(
    ("store", "slot_bytes"), [("sym8:bucket=128", 192), ("minmax4:bucket=128", 128), ("qsgd8:bucket=128", 192)]
)
@pytest.mark.on("pair", group={})
def test_both_sides_hold_the_same_codes(r, store, slot_bytes):
    cache = lc.pipeline.Cache(store=store)
    rows, _ = _steps(r, cache, 3)
    assert rows[:, 2].tolist() == [3] * case.ROWS
    case.equal_rows(rows)
    assert cache.bytes == case.ROWS * slot_bytes
    if r.rank == 0:
        samples = next(iter(lc.stats().values()))["send forward boundary 0"]["samples"]
        # A change that is due to the store alone is a part of the activation.
        assert 0 < samples["mean_change"] < 0.5 * samples["mean_value"]


@pytest.mark.on("pair", group={})
def test_files_are_found_again(r):
    """Files are found again after a restart: the steps that follow have the bits of a run in RAM that went on."""
    ram = lc.pipeline.Cache()
    _steps(r, ram, 2)
    going_on, stages = _steps(r, ram, 1)
    want = case.gradients(stages)

    options = {"folder": Path(r.folder) / f"cache{r.rank}", "run": "a"}
    cache = lc.pipeline.Cache(**options)
    before, _ = _steps(r, cache, 2)
    with pytest.raises(OSError, match="which another cache has open"):
        lc.pipeline.Cache(**options)
    cache.close()
    again = lc.pipeline.Cache(**options)
    assert torch.equal(again.slots.rows(0, r.rank == 0), before)
    rows, stages = _steps(r, again, 1)
    assert torch.equal(rows, going_on)
    assert all(map(torch.equal, case.gradients(stages), want))
    assert again.stats() == {
        "slots": case.ROWS,
        "bytes": ram.bytes,
        "seen": case.ROWS,
        "first": 0,
        "overflow": 0,
        "read_ahead": 0,
        "read_late": case.ROWS,  # nobody has named the step's samples before it
        "forgotten": {},
    }
    again.close()
    # Rank 1 starts without its file, rank 0 with one slot damaged: both forget, and count.
    (file,) = options["folder"].glob("*.slots")
    if r.rank == 1:
        file.unlink()
    else:
        with file.open("r+b") as slots:
            slots.seek(8192 + 5)
            slots.write(b"x")
    last = lc.pipeline.Cache(**options)
    rows, _ = _steps(r, last, 1)
    case.equal_rows(rows)
    assert rows[:, 2].tolist() == [1] * case.ROWS
    assert last.stats()["forgotten"] == ({"damaged": 1, "differs": case.ROWS - 1} if r.rank == 0 else {})
    if r.rank == 0:  # by group and boundary, too
        samples = next(iter(lc.stats().values()))["send forward boundary 0"]["samples"]
        assert samples["forgotten"] == last.stats()["forgotten"]


@pytest.mark.on("pair", group={})
def test_samples_without_room(r):
    slot = 3 * case.WIDTH * 2
    for overflow in ("stateless", "minmax8:bucket=128", None):
        cache = lc.pipeline.Cache(max_bytes=10 * slot + 1, overflow=overflow)
        rows, _ = _steps(r, cache, 3)
        case.equal_rows(rows)
        assert rows[:, 1].tolist() == list(range(10)), "the first that came"
        stats = cache.stats()
        assert (stats["bytes"], stats["first"], stats["seen"]) == (10 * slot, 10, 20)
        assert stats["overflow"] == 3 * (case.ROWS - 10)
        if r.rank == 0:
            assert (
                next(iter(lc.stats().values()))["send forward boundary 0"]["samples"]["overflow"] == stats["overflow"]
            )
        lc.reset_stats()


def test_files_of_another_kind_are_refused(tmp_path):
    # A file as a stage makes it.
    cache = lc.pipeline.Cache(folder=tmp_path, run="a")
    slot = lc.pipeline.cache.Slot(0, 0, True)
    cache.slots.memory(slot, 72, 24).restore(7, 3, torch.arange(144, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"boundary 0.0.sent: expected 72 elements a sample, as it has .*, got 48"):
        cache.slots.memory(slot, 48, 24)
    cache.close()
    with pytest.raises(ValueError, match="expected an open file"):
        cache.slots.rows(0, True)
    file = tmp_path / "0.0.sent.slots"
    with pytest.raises(ValueError, match=f"{file}': run: expected 'b', got 'a'"):
        lc.pipeline.Cache(folder=tmp_path, run="b")
    with pytest.raises(ValueError, match=f"{file}': format: expected 'sym8:axis=channel,C=24', got 'float16'"):
        lc.pipeline.Cache(folder=tmp_path, run="a", store="sym8:axis=channel")
    assert lc.pipeline.Cache(folder=tmp_path, run="a").slots.rows(0, True)[:, :3].tolist() == [[0, 7, 3]]
    file.write_bytes(b"")  # a process that was killed as it made the file
    assert lc.pipeline.Cache(folder=tmp_path, run="a", store="bf16") is not None
    with pytest.raises(OSError, match=str(file)):
        lc.pipeline.Cache(folder=file)
    (tmp_path / "other.slots").write_bytes(b"x")
    with pytest.raises(ValueError, match="slot: expected 'boundary.position.sent'"):
        lc.pipeline.Cache(folder=tmp_path)


def test_options_of_a_cache():
    for options, said in (
        ({"store": "levels4"}, "a codec without a level table"),
        ({"max_bytes": 0}, "max_bytes: expected 1 or more, got 0"),
        ({"overflow": "drop"}, "codec 'drop'"),
    ):
        with pytest.raises(ValueError, match=said):
            lc.pipeline.Cache(**options)


@pytest.mark.on("pair", group={})
def test_a_checkpoint_holds_each_ranks_slots(r):
    """torch.distributed.checkpoint saves caches of different slots a rank, and fills empty ones."""
    import torch.distributed.checkpoint as dcp

    cache = lc.pipeline.Cache(state=True, store="sym8:bucket=128")
    _steps(r, cache, 2)
    memory = cache.slots.memory(lc.pipeline.cache.Slot(0, 0, r.rank == 0), 3 * case.WIDTH, case.WIDTH, case.WIDTH)
    if r.rank == 1:
        for sample in range(5):
            memory.forget(sample)
    rows = cache.slots.rows(0, r.rank == 0)
    dcp.save({"cache": cache}, checkpoint_id=Path(r.folder) / "checkpoint")
    loaded = lc.pipeline.Cache(state=True, store="sym8:bucket=128")
    dcp.load({"cache": loaded}, checkpoint_id=Path(r.folder) / "checkpoint")
    assert torch.equal(loaded.slots.rows(0, r.rank == 0), rows)
    assert len(rows) == case.ROWS - 5 * r.rank
    both, _ = _steps(r, loaded, 1)
    case.equal_rows(both)
    assert sorted(both[:, 2].tolist()) == [1] * 5 + [3] * (case.ROWS - 5)

    with pytest.raises(ValueError, match="expected a state of store 'fp16', got 'sym8:bucket=128'"):
        lc.pipeline.Cache().load_state_dict(cache.state_dict())
    other = {"rank7": cache.state_dict()[f"rank{r.rank}"]}
    with pytest.raises(ValueError, match=f"expected a state of rank{r.rank}, got one of rank7"):
        loaded.load_state_dict(other)
    # torch.save's way, and a state without slots, which changes nothing.
    torch.save(cache.state_dict(), Path(r.folder) / f"cache{r.rank}.pt")
    loaded.load_state_dict(torch.load(Path(r.folder) / f"cache{r.rank}.pt"))
    assert torch.equal(loaded.slots.rows(0, r.rank == 0), rows)
    loaded.load_state_dict(lc.pipeline.Cache(store="sym8:bucket=128").state_dict())
    assert torch.equal(loaded.slots.rows(0, r.rank == 0), rows)


def test_a_fork_leaves_the_files_alone(tmp_path):
    """A child of a process with a cache ends at once, by itself, and writes nothing."""
    cache = lc.pipeline.Cache(folder=tmp_path)
    memory = cache.slots.memory(lc.pipeline.cache.Slot(0, 0, True), 72, 24)
    memory.restore(1, 1, torch.zeros(144, dtype=torch.uint8))
    child = os.fork()
    if child == 0:
        try:
            del memory
            cache.slots._memories.clear()
            del cache
        finally:
            os._exit(0)
    end = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child did not end")
        time.sleep(0.01)
    assert ended[1] == 0
    assert memory.version(1) == 1
    cache.close()
    assert len(lc.pipeline.Cache(folder=tmp_path).slots.rows(0, True)) == 1
