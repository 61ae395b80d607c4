"""A checksum of what a checkpoint holds, so that a damaged or edited one is refused before anything is loaded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_lowcomm import _C


def checksum(value: Any, before: int = 0) -> int:
    """CRC-32C of a nest of mappings, lists, tensors, bytes and numbers: of keys, dtypes, shapes and values, behind what `before`
    is the checksum of. Of a DTensor this rank's shard counts. Keys count in any order of insertion.
    """
    if isinstance(value, torch.Tensor):
        shard = value.to_local() if isinstance(value, DTensor) else value
        tensor = shard.detach().cpu().contiguous()
        before = _text(f"{tensor.dtype} {tuple(tensor.shape)}", before)
        return _C.crc32c(tensor.reshape(-1).view(torch.uint8), before) if tensor.numel() else before
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            before = checksum(value[key], _text(repr(key), before))
        return before
    if isinstance(value, list | tuple):
        for item in value:
            before = checksum(item, _text(",", before))
        return before
    if isinstance(value, bytes):
        return bytes_checksum(value, before)
    return _text(repr(value), before)


def expect_checksum(what: str, value: Any, expected: Any) -> None:
    """Raises ValueError where a value's checksum is another one."""
    got = checksum(value)
    if expected != got:
        was = f"{expected:08x}" if isinstance(expected, int) else expected
        raise ValueError(
            f"{what}: load_state_dict: expected a state with CRC-32C {was}, as it was saved, got {got:08x}: it is damaged, "
            "was changed, or is of other shards"
        )


def bytes_checksum(data: bytes, before: int = 0) -> int:
    """CRC-32C of bytes, behind those that `before` is the checksum of."""
    return _C.crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8), before) if data else before


def _text(text: str, before: int) -> int:
    return bytes_checksum(text.encode(), before)
