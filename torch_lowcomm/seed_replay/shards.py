"""The shards that the ranks of a machine have of its weights (FSDP2): what lies where, their core, their part of a snapshot."""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torch_lowcomm import _C
from torch_lowcomm._reshard import reshard
from torch_lowcomm._saved import packed, unpacked
from torch_lowcomm.diloco.parameters import local
from torch_lowcomm.groups import exact
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks

# A row of the core's list: name, tensor, whether it decays, its first element's place in the whole tensor.
Entry = tuple[str, torch.Tensor, bool, int]


def entries(model: nn.Module) -> list[Entry]:
    """Returns the parameters that require gradients, in the order of the model's names; of a DTensor this rank's shard. Biases
    and norms do not decay. No such parameter, or a DTensor whose shards are no runs of its elements, is a ValueError.
    """
    found = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found.append((name, local(parameter), parameter.dim() >= 2, _first_element(name, parameter)))
    if not found:
        raise ValueError("SeedReplay: model: expected parameters that require gradients, got none")
    return found


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Returns the one mesh of the trained parameters, else ValueError; None if these are plain tensors. The model is resharded
    first: a module whose weights FSDP2 has gathered shows them as plain tensors.
    """
    reshard(model)
    found: tuple[str, DeviceMesh] | None = None
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not isinstance(parameter, DTensor):
            continue
        if found is not None and parameter.device_mesh != found[1]:
            raise ValueError(
                f"SeedReplay: parameter {name!r}: expected the mesh of {found[0]!r}, {found[1]}, got {parameter.device_mesh}"
            )
        found = found or (name, parameter.device_mesh)
    return None if found is None else found[1]


def _first_element(name: str, parameter: torch.Tensor) -> int:
    """Returns the element of the whole parameter with which this rank's shard begins; 0 of a plain tensor."""
    if not isinstance(parameter, DTensor):
        return 0
    sharded = [placement for placement in parameter.placements if type(placement) is not Replicate]
    if len(sharded) > 1 or any(type(placement) is not Shard or placement.dim != 0 for placement in sharded):
        raise ValueError(
            f"SeedReplay: parameter {name!r}: expected Shard(0) on one dimension of the mesh and Replicate on others, so that a "
            f"shard is a run of elements, got {parameter.placements}"
        )
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if tuple(local(parameter).shape) != tuple(shape):
        raise ValueError(
            f"SeedReplay: parameter {name!r}: expected a shard of shape {tuple(shape)}, got {tuple(local(parameter).shape)}"
        )
    return offset[0] * math.prod(shape[1:]) if sharded and 0 not in shape else 0


def like(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of a shard's values as the parameter's DTensor is; of a plain parameter the tensor itself."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def expect_same_memory(own: Sequence[Entry], parameters: Sequence[torch.Tensor]) -> None:
    """Raises ValueError where a parameter has got other memory, as by `model.to` or an assigning `load_state_dict`."""
    for (name, shard, _, _), parameter in zip(own, parameters, strict=True):
        if local(parameter).data_ptr() != shard.data_ptr():
            raise ValueError(
                f"SeedReplay: parameter {name!r}: expected the memory that it had when the optimizer was made, got other: move "
                "and load the model before"
            )


def layout(name: str, parameter: torch.Tensor) -> str:
    """Returns name, shape, type and placements of a parameter, which ranks of a machine compare."""
    placements = str(parameter.placements) if isinstance(parameter, DTensor) else "plain"
    return f"{name}:{parameter.dtype}{list(parameter.shape)}:{placements}".replace(" ", "")


class ShardedCore:
    """The core of one rank's shards, with the checksum of the whole weights; all else is the core's own."""

    def __init__(self, core: _C.SeedReplay, ranks: MachineRanks, own: Sequence[Entry]) -> None:
        self._core, self._ranks = core, ranks
        self._pieces = [(first * shard.element_size(), shard.nbytes) for _, shard, _, first in own]

    def __getattr__(self, name: str) -> Any:
        """The core's attribute."""
        return getattr(self._core, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the core's attribute where it has one."""
        if name in ("iteration", "sums"):
            setattr(self._core, name, value)
        else:
            super().__setattr__(name, value)

    def checksum(self) -> int:
        """Returns the CRC-32C of the whole weights, as an unsharded machine has it; RuntimeError where ranks have different
        values in the same part. Collective of the machine.
        """
        mine = [(*piece, crc) for piece, crc in zip(self._pieces, self._core.checksums(), strict=True)]
        whole = 0
        for number, pieces in enumerate(zip(*self._ranks.gather(mine), strict=True)):
            found: dict[int, tuple[int, int, int]] = {}  # by first byte: bytes, CRC, rank
            for rank, (first, size, crc) in zip(self._ranks.ranks, pieces, strict=True):
                if size and found.setdefault(first, (size, crc, rank))[:2] != (size, crc):
                    raise RuntimeError(
                        f"SeedReplay: iteration {self.iteration}: expected equal weights in parameter {number}, got CRC-32C "
                        f"{found[first][1]:08x} on rank {found[first][2]} and {crc:08x} on rank {rank} of one machine"
                    )
            for _, (size, crc, _) in sorted(found.items()):
                whole = _C.joined_crc32c(whole, crc, size)
        return whole


# ---- snapshots: the first rank has the whole weights, and the others get their shards of it ----
def gathered(weights: dict[str, torch.Tensor], ranks: MachineRanks) -> dict[str, torch.Tensor]:
    """Returns whole weights in host memory on the first rank, and none on the others, one after another. Collective."""
    kept = {}
    for name, shard in weights.items():
        with exact():
            tensor = shard.full_tensor() if isinstance(shard, DTensor) else shard
        if ranks.first:
            kept[name] = tensor.detach().cpu()
    return kept


def scattered(
    saved: dict[str, Any], own: Sequence[Entry], parameters: Sequence[torch.Tensor], ranks: MachineRanks
) -> dict[str, Any]:
    """Returns `saved`, the first rank's snapshot, with this rank's shards in place of the weights. Collective. Where it is no
    snapshot of such weights all ranks raise ValueError.
    """
    error = _mistake(saved, own, parameters) if ranks.first else ""
    error = json.loads(ranks.bytes_of_first(json.dumps(error).encode()))
    if error:
        raise ValueError(f"SeedReplay: snapshot: {error}")
    optimizer = unpacked(ranks.bytes_of_first(packed(saved["optimizer"]) if ranks.first else b""))
    weights = {}
    for (name, shard, _, first), parameter in zip(own, parameters, strict=True):
        if ranks.first:
            tensor = saved["weights"][name].to("cpu", shard.dtype).contiguous()
        else:
            tensor = torch.empty(parameter.shape, dtype=shard.dtype)
        whole = ranks.tensor_of_first(tensor)
        weights[name] = whole.reshape(-1)[first : first + shard.numel()].view(shard.shape).clone()
    return {"optimizer": optimizer, "weights": weights}


def _mistake(saved: dict[str, Any], own: Sequence[Entry], parameters: Sequence[torch.Tensor]) -> str:
    """Says what keeps a value from being a snapshot of these weights; nothing if it is one."""
    if not {"optimizer", "weights"} <= set(saved) or saved["weights"] is None:
        return f"expected one with optimizer and weights on the machine's first rank, got {sorted(saved)}"
    for (name, _, _, _), parameter in zip(own, parameters, strict=True):
        found = saved["weights"].get(name)
        if found is None or found.shape != parameter.shape:
            got = "none" if found is None else f"{tuple(found.shape)}"
            return f"expected {name!r} of shape {tuple(parameter.shape)}, got {got}"
    return ""
