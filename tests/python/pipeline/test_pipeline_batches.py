"""lc.pipeline.batches: parts and batches that are the same on every stage and replica, with a last batch dropped or filled up."""

import itertools

import pytest
import stages_case as case
import torch
from torch.distributed.device_mesh import init_device_mesh

import torch_lowcomm as lc


def _numbers(samples, **options):
    """The samples of each batch."""
    return [batch[0].tolist() for batch in lc.pipeline.batches(torch.arange(samples), **options)]


def _epochs(batches, epochs):
    steps = len(batches) // epochs
    assert steps * epochs == len(batches)
    return [batches[i * steps : (i + 1) * steps] for i in range(epochs)]


@pytest.mark.parametrize("shuffle", ["epoch", "once", "global"])
@pytest.mark.parametrize("last", ["drop", "fill"])
def test_no_sample_comes_twice_in_a_batch_and_replicas_take_equally_many_steps(shuffle, last):
    for samples, replicas, batch in itertools.product((8, 9, 15, 16, 17, 31), (1, 2, 3), (1, 2)):
        batch *= max(1, samples // replicas // 3)
        options = {"batch": batch, "epochs": 3, "shuffle": shuffle, "last": last, "replicas": replicas, "seed": 4}
        of = [_numbers(samples, replica=replica, **options) for replica in range(replicas)]
        assert of == [_numbers(samples, replica=replica, **options) for replica in range(replicas)], "every stage's"
        assert len({len(batches) for batches in of}) == 1
        for epoch in zip(*(_epochs(batches, 3) for batches in of), strict=True):
            seen = [set(itertools.chain(*batches)) for batches in epoch]
            assert all(len(set(one)) == len(one) == batch for batches in epoch for one in batches)
            assert not any(a & b for a, b in itertools.combinations(seen, 2)), "parts are apart"
            each = samples // replicas
            if last == "fill":
                assert set.union(*seen) == set(range(samples)), "every sample comes in every epoch"
            else:
                assert [len(part) for part in seen] == [each // batch * batch] * replicas
        fixed = [set(itertools.chain(*batches)) for batches in of]
        if shuffle != "global" and last == "fill":
            assert sum(map(len, fixed)) == samples, "a replica's part is the same in every epoch"


def test_a_batch_is_filled_up_by_the_first_samples_of_its_epoch():
    first, second = _epochs(_numbers(10, batch=4, last="fill", epochs=2), 2)
    for epoch in (first, second):
        assert len(epoch) == 3
        assert epoch[2][2:] == epoch[0][:2]
    assert first != second
    with pytest.raises(ValueError, match="last: expected 'drop' or 'fill', got 'keep'"):
        _numbers(10, batch=4, last="keep")
    with pytest.raises(ValueError, match="expected 'epoch', 'once' or 'global', got 'all'"):
        _numbers(10, batch=4, shuffle="all")
    with pytest.raises(ValueError, match="batch: expected at most the 10 samples of a replica's part, got 11"):
        _numbers(10, batch=11, last="fill")


@pytest.mark.on("quad", group={})
def test_filled_batches_of_two_replicas(r):
    """Two replicas of two stages on 61 samples: what a filled batch repeats is one more visit, on both sides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, index = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
    cache, samples, epochs = lc.pipeline.Cache(), 61, 3
    schedule, _ = case.build(index, 2, "1F1B", group=mesh.get_group("stage"), cache=cache, **case.CODED)
    steps = 0
    for numbers, x, y in lc.pipeline.batches(
        case.data()[:samples],
        batch=case.ROWS,
        epochs=epochs,
        last="fill",
        replica=replica,
        replicas=2,
    ):
        lc.pipeline.step(schedule, x, samples=numbers, target=y)
        steps += 1
    assert steps == 2 * epochs
    rows = case.equal_rows(cache.slots.rows(0, index == 0), mesh.get_group("stage"))
    everybody = case.gathered({row[1]: row[2] for row in rows})
    parts = everybody[::2]
    assert sorted(itertools.chain(*parts)) == list(range(samples))
    assert sum(sum(part.values()) for part in parts) == 2 * steps * case.ROWS, "a version a visit"
    assert cache.stats()["forgotten"] == {}
