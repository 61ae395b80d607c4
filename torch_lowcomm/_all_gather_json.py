"""Gathers a value of every rank of a group, as JSON: c10d's object collectives would unpickle what a peer sends."""

import json
from typing import Any

import torch
import torch.distributed as dist

from torch_lowcomm._torch_names import all_gather_single
from torch_lowcomm.groups import exact


def all_gather_json(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks, over a group of any backend that gathers bytes in host memory. Collective.

    Values are as JSON returns them: a tuple becomes a list. One that JSON does not have is a TypeError; nothing was sent then.
    """
    data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    size = dist.get_world_size(group)
    lengths = torch.empty(size, dtype=torch.int64)
    with exact():
        all_gather_single(lengths, torch.tensor([len(data)]), group=group)
        longest = int(lengths.max())
        found = torch.empty(size * longest, dtype=torch.uint8)
        all_gather_single(found, torch.nn.functional.pad(data, (0, longest - len(data))), group=group)
    rows = zip(found.view(size, longest), lengths.tolist(), strict=True)
    return [json.loads(row[:length].numpy().tobytes()) for row, length in rows]
