"""Shapes that torch's stages tell each other are read without unpickling: torch's descriptions of tensors, and nothing else."""

import os

import pytest
import torch
from torch.distributed.pipelining import _utils
from torch.distributed.tensor import Replicate, Shard

from torch_lowcomm.pipeline import shapes

pytestmark = pytest.mark.skipif(not hasattr(_utils, "_StageForwardMeta"), reason="this torch sends shapes itself")


def test_descriptions_come_back_equal():
    plain = _utils._TensorMeta(torch.Size([2, 3]), (3, 1), torch.bfloat16, True)
    sharded = _utils._DTensorMeta(
        torch.Size([2, 3]),
        (3, 1),
        torch.float32,
        False,
        torch.Size([4, 3]),
        (3, 1),
        (Shard(0), Replicate()),
        ("dp", "tp"),
    )
    forward, backward = _utils._StageForwardMeta((plain, sharded)), _utils._StageBackwardMeta((plain, None))
    for given in (forward, backward):
        numbers = shapes.to_numbers(given)
        assert numbers.dtype == torch.int64 and len(numbers) <= shapes.MOST
        known = set(torch.serialization.get_safe_globals())
        assert shapes.of_numbers(numbers) == given
        assert set(torch.serialization.get_safe_globals()) == known  # torch's own stay, which checkpoints need


class _Call:
    """An object that calls when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (os.environ["LOWCOMM_TEST_UNPICKLED"],)


def test_other_objects_are_refused_and_not_made(tmp_path, monkeypatch):
    made = tmp_path / "made"
    monkeypatch.setenv("LOWCOMM_TEST_UNPICKLED", str(made))
    with pytest.raises(ValueError, match="shapes: expected a description of tensors, got another object"):
        shapes.of_numbers(shapes.to_numbers(_Call()))
    assert not made.exists()
    with pytest.raises(ValueError, match="shapes: expected a description"):
        shapes.of_numbers(torch.arange(100))


@pytest.mark.parametrize("size", [0, -1, shapes.MOST + 1, 2**62])
def test_an_announced_size_is_bounded(size):
    with pytest.raises(ValueError, match=rf"shapes: expected 1\.\.\.{shapes.MOST} bytes, got {size}"):
        shapes.room_for(size)
