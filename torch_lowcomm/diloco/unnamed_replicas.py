"""Notices ranks that would send once in place of several times: replicas of a site that nothing names, sites of one host."""

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_lowcomm._log import logger
from torch_lowcomm.diloco.parameters import local

_VALUES = 8  # of each parameter: enough to tell replicas from stages of the same shapes, and no pass over the model


def look_of(tensors: Sequence[torch.Tensor], model: nn.Module | None) -> str:
    """Returns a hash of the names (`model`'s), shapes and first values of what this rank holds; "" where it holds nothing."""
    if not tensors:
        return ""
    try:
        names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        told = [[names.get(id(tensor), ""), list(tensor.shape), _first_values(local(tensor))] for tensor in tensors]
    except Exception:  # of what is no parameter: it is refused later, on all ranks
        return ""
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _first_values(tensor: torch.Tensor) -> list[str]:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return []
    row = tensor[:1] if tensor.dim() > 1 else tensor
    return [str(value) for value in row.flatten()[:_VALUES].tolist()]


def warn_of_unnamed(looks: Sequence[str], parts: Sequence[int], site: Sequence[int], mesh: DeviceMesh | None) -> None:
    """Logs a warning where ranks of the site, global, that look the same (`look_of`) hold different parts of the model."""
    for look in dict.fromkeys(filter(None, looks)):
        first: dict[int, int] = {}  # by part: the first rank that looks so
        for place, part in enumerate(parts):
            if looks[place] == look:
                first.setdefault(part, site[place])
        if len(first) > 1:
            ranks = list(first.values())
            logger.warning(
                "DiLoCoX: ranks %s of this site hold parameters of the same names, shapes and first values, and are averaged "
                "as different parts of a model: the site sends %d messages for what one would do for, if they are replicas. "
                "Then %spass replicas=",
                ranks,
                len(ranks),
                _naming(ranks, mesh),
            )
            return


def warn_of_one_host(hosts: Sequence[Sequence[int]]) -> None:
    """Logs a warning where several hosts, by their global ranks, have sites of one rank each, and a host has several."""
    most = max(hosts, key=len)
    if len(hosts) > 1 and len(most) > 1:
        logger.warning(
            "DiLoCoX: ranks %s are on one host and each is a site of its own: %d outer messages cross this host's link. One does "
            "where they train together, by DDP over these ranks alone or FSDP2: pass mesh= (its first dimension along hosts)",
            list(most),
            len(most),
        )


def _naming(ranks: Sequence[int], mesh: DeviceMesh | None) -> str:
    """The other remedy, where a mesh was given: a name for the dimension along these ranks."""
    if mesh is None:
        return ""
    places = torch.stack([(mesh.mesh == rank).nonzero()[0] for rank in ranks])
    along = (places != places[0]).any(0).nonzero().flatten().tolist()
    names = mesh.mesh_dim_names or [str(dimension) for dimension in range(mesh.ndim)]
    return f"name the mesh's dimension {' and '.join(repr(names[one]) for one in along)} 'replicas', or "
