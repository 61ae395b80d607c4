"""shuffle="global": every epoch has other parts, and what is remembered of a sample moves with it."""

import itertools
from pathlib import Path

import pytest
import stages_case as case
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_lowcomm as lc

EPOCHS, BATCH = 3, 16


def _rows(cache, stage):
    return [tuple(row) for row in cache.slots.rows(0, stage == 0).tolist()]


@pytest.mark.parametrize("where", ["ram", "files", "codes", "no room"])
@pytest.mark.on("quad", group={})
def test_slots_move_with_their_samples(r, where):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, index = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
    among = mesh.get_group("replica")
    slot = 3 * case.WIDTH * 2
    options = {
        "ram": {},
        "files": {"folder": Path(r.folder) / f"moved{r.rank}"},
        "codes": {"store": "sym8:bucket=128"},
        "no room": {"max_bytes": 20 * slot},
    }[where]
    cache = lc.pipeline.Cache(**options)
    schedule, _ = case.build(index, 2, "1F1B", group=mesh.get_group("stage"), cache=cache, **case.CODED)
    parts, before = [], []
    batches = lc.pipeline.batches(
        case.data(),
        batch=BATCH,
        seed=5,
        epochs=EPOCHS,
        shuffle="global",
        replica=replica,
        replicas=2,
        cache=cache,
        group=among,
    )
    steps = case.SAMPLES // 2 // BATCH
    for number, (samples, x, y) in enumerate(batches):
        if number and number % steps == 0 and where != "no room":  # after a move: nothing is lost, nothing is twice
            now = case.gathered(_rows(cache, index), among)
            assert sorted(itertools.chain(*now)) == sorted(itertools.chain(*before))
            assert set(samples.tolist()) <= {row[1] for row in now[replica]}
            assert len(now[replica]) == case.SAMPLES // 2
        lc.pipeline.step(schedule, x, samples=samples, target=y)
        parts.append(set(samples.tolist()))
        before = case.gathered(_rows(cache, index), among)
        case.equal_rows(cache.slots.rows(0, index == 0), mesh.get_group("stage"))
    first, second = (set.union(*parts[e * steps : (e + 1) * steps]) for e in (0, 1))
    assert len(first) == len(second) == case.SAMPLES // 2
    assert first != second, "parts are drawn anew"
    stats = cache.stats()
    if where == "no room":
        assert stats["slots"] <= 20
        assert stats["overflow"] > 0
    else:
        assert stats["slots"] == case.SAMPLES // 2
        assert stats["seen"] == (EPOCHS - 1) * case.SAMPLES // 2, "no sample but of the first epoch is a first visit"
        assert [row[2] for row in _rows(cache, index)] == [EPOCHS] * (case.SAMPLES // 2)
        assert stats["forgotten"] == {}


@pytest.mark.on("trio", group={})
def test_slots_move_in_rounds(r):
    """Slots of many rounds, in all directions between three ranks; ranks that hold different numbers of them."""
    elements, each = 1 << 20, 12  # 2 MiB a slot: eight a round
    cache = lc.pipeline.Cache()
    memory = cache.slots.memory(lc.pipeline.cache.Slot(0, 0, True), elements, 64)
    for i in range(each if r.rank else 2 * each):
        sample = 100 * r.rank + i
        memory.restore(sample, 1 + i, torch.full((memory.slot_bytes,), sample % 251, dtype=torch.uint8))
    owners = torch.full((300,), -1)
    for sample in range(300):
        owners[sample] = -1 if sample % 5 == 0 else sample % r.size
    given, taken = cache.move(owners, dist.group.WORLD)
    totals = case.gathered((given, taken))
    assert sum(given for given, _ in totals) == sum(taken for _, taken in totals) > 0
    for sample, version, _ in memory.table():
        home, i = divmod(sample, 100)
        assert r.rank == (home if sample % 5 == 0 else sample % r.size)
        assert version == 1 + i
        assert bool((memory.read(sample) == sample % 251).all())
    assert sum(case.gathered(len(memory.table()))) == 4 * each
    with pytest.raises(ValueError, match=r"owners: expected -1 or a rank of 0\.\.\.2, got -1 to 3"):
        cache.move(torch.tensor([-1, 3]), dist.group.WORLD)
    # The pool destroys the group, after a barrier: no op here waits for the other rank, which may still connect.


@pytest.mark.on("pair", group={})
def test_a_group_that_is_not_the_replicas(r):
    cache = lc.pipeline.Cache()

    def first(**options):
        return next(lc.pipeline.batches(case.data(), batch=4, shuffle="global", cache=cache, **options))

    for options, said in (
        ({"replicas": 2, "replica": r.rank}, "group: expected the ranks of this stage in all replicas.*got none"),
        ({"replicas": 3, "replica": r.rank, "group": dist.group.WORLD}, "a rank for each of the 3 replicas, got 2"),
        (
            {"replicas": 2, "replica": 1 - r.rank, "group": dist.group.WORLD},
            f"at place {1 - r.rank}, its replica's number, got {r.rank}",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            first(**options)
    with pytest.raises(ValueError, match="expected 'epoch', 'once' or 'global', got 'all'"):
        next(lc.pipeline.batches(case.data(), batch=4, shuffle="all"))
