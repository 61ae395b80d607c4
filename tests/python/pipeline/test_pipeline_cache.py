"""Caches of lc.pipeline: stores of few bits, in files and bounded; what they save and how they are found again."""

import pytest
import stages_case as case
import torch
import torch.distributed as dist

CODED = {"forward": "gauss4", "backward": "minmax8:bucket=128"}


def _batch():
    return [torch.stack(part) for part in zip(*case.data()[: case.ROWS], strict=True)]


def _steps(r, cache, count, **options):
    """(rows, losses, stages) after `count` steps on one batch."""
    import torch_lowcomm as lc

    schedule, stages = case.build(r.rank, r.size, "1F1B", cache=cache, **{**CODED, **options})
    x, y = _batch()
    losses = []
    for _ in range(count):
        lc.pipeline.step(schedule, x, samples=range(case.ROWS), target=y, losses=losses)
    return cache.rows(0, r.rank == 0), losses, stages


def _expect_equal_sides(rows):
    gathered = [torch.empty_like(rows) for _ in range(2)]
    dist.all_gather(gathered, rows)
    assert torch.equal(*gathered)


def _few_bits(r, store, slot_bytes):
    import torch_lowcomm as lc

    r.init("lowcomm")
    cache = lc.pipeline.Cache(store=store)
    rows, _, _ = _steps(r, cache, 3)
    assert rows[:, 2].tolist() == [3] * case.ROWS
    _expect_equal_sides(rows)
    assert cache.bytes == case.ROWS * slot_bytes
    if r.rank == 0:
        samples = next(iter(lc.stats().values()))["send forward boundary 0"]["samples"]
        # A change that is due to the store alone is a part of the activation.
        assert 0 < samples["mean_change"] < 0.5 * samples["mean_value"]
    dist.destroy_process_group()


# A slot of [3, 24]: a scale a channel, or one for 128 elements; codes and scales fill 64 bytes each.
@pytest.mark.parametrize(
    ("store", "slot_bytes"), [("sym8:axis=channel", 256), ("minmax4:bucket=128", 128), ("qsgd8:bucket=128", 192)]
)
def test_both_sides_hold_the_same_codes(pair, store, slot_bytes):
    pair(_few_bits, store, slot_bytes)
