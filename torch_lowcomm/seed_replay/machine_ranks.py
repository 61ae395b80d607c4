"""The ranks of one machine: they agree, average their losses, and hear from the first of them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_lowcomm._all_gather_json import all_gather_json
from torch_lowcomm._log import logger
from torch_lowcomm._text_difference import show_both
from torch_lowcomm.groups import exact


class MachineRanks:
    """The ranks that share out one machine's weights, in the order of their mesh; None for one rank. Every method is a
    collective. A mesh without this rank, or with a group that gathers nothing in host memory, is a ValueError. `first` is the
    rank that speaks for the machine; `ranks` are global, in their order.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.several, self.first = mesh is not None, True
        self.ranks = [dist.get_rank() if dist.is_initialized() else 0]
        self._groups: list[dist.ProcessGroup] = []
        if mesh is None:
            return
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"SeedReplay: expected a rank of the parameters' mesh {mesh}, got rank {dist.get_rank()}")
        self._coordinate = coordinate
        self._groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
        for group in self._groups:
            devices = [device.type for device in group._device_types]
            if "cpu" not in devices:
                raise ValueError(
                    "SeedReplay: expected a mesh whose ranks gather bytes in host memory too, as with "
                    f'init_process_group("cpu:lowcomm,cuda:nccl"), got a group for {", ".join(devices)}'
                )
        self.ranks = mesh.mesh.flatten().tolist()
        self.first = not any(coordinate)

    def gather(self, mine: Any) -> list[Any]:
        """Returns every rank's value, of a kind that `all_gather_json` takes."""
        found = [mine]
        for group in reversed(self._groups):
            found = [value for part in all_gather_json(found, group) for value in part]
        return found

    def agree(self, topic: str, make: Callable[[], Any]) -> Any:
        """Returns what `make` returns, the same on all ranks; `topic` says in an error what it is. It is a ValueError where it
        raised on another rank, or returned something else.
        """
        value, error = None, None
        try:
            value = make()
        except Exception as raised:
            error = raised
        found = self.gather([None if error is None else str(error), value])
        if error is not None:
            raise error
        for rank, (text, _) in zip(self.ranks, found, strict=True):
            if text is not None:
                raise ValueError(
                    f"SeedReplay: {topic}: expected no rank of this machine to fail, got on rank {rank}: {text}"
                )
        for rank, (_, other) in zip(self.ranks, found, strict=True):
            if other != found[0][1]:
                raise ValueError(
                    f"SeedReplay: {topic}: expected the same on all ranks of a machine, got {show_both(found[0][1], other)} on "
                    f"ranks {self.ranks[0]} and {rank}"
                )
        return value

    def mean(self, loss: float, *, at: Sequence[float]) -> float:
        """Returns the mean of the ranks' losses: their exact sum, rounded, over their number; NaN if one is not finite. `at`
        says which evaluation this is; where ranks are at different ones all raise RuntimeError.
        """
        if not self.several:
            return loss
        rows = self.gather([loss, *at])
        for rank, row in zip(self.ranks, rows, strict=True):
            if row[1:] != rows[0][1:]:
                raise RuntimeError(
                    f"SeedReplay: expected all ranks of a machine at the same evaluation, got {rows[0][1:]} and {row[1:]} on "
                    f"ranks {self.ranks[0]} and {rank}"
                )
        losses = [row[0] for row in rows]
        lost = [rank for rank, value in zip(self.ranks, losses, strict=True) if not math.isfinite(value)]
        if not lost:
            return math.fsum(losses) / len(losses)
        if len(lost) < len(losses):
            logger.warning(
                "SeedReplay: the loss is not finite on ranks %s of this machine's ranks %s: the sample is skipped",
                lost,
                self.ranks,
            )
        return math.nan

    def any(self, mine: bool) -> bool:
        """Returns whether it holds on any rank."""
        return any(self.gather(mine))

    def bytes_of_first(self, data: bytes) -> bytes:
        """Returns the first rank's bytes; the other ranks' are ignored."""
        length = int(self.tensor_of_first(torch.tensor([len(data)])))
        if length == 0:
            return b""
        mine = bytearray(data if self.first else length)
        return self.tensor_of_first(torch.frombuffer(mine, dtype=torch.uint8)).numpy().tobytes()

    def tensor_of_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sets a contiguous tensor in host memory to the first rank's, which has its shape and type; returns it."""
        data = tensor.view(-1).view(torch.uint8)
        if data.numel():
            # From the first rank along the last dimension of the mesh, from these along the one before, and so on.
            for dimension, group in reversed(list(enumerate(self._groups))):
                if not any(self._coordinate[:dimension]):
                    with exact():
                        dist.broadcast(data, group=group, group_src=0)
        return tensor
