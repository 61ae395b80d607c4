"""Makes the groups of an outer loop: those that average over sites, and that of the ranks of this site."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torch_lowcomm import _C
from torch_lowcomm._all_gather_json import all_gather_json
from torch_lowcomm._ddp_around import ranks_of_ddp, without_ddp
from torch_lowcomm._hosts import rows_of
from torch_lowcomm.diloco.inner_optimizer import parameters_of
from torch_lowcomm.diloco.parameters import sharing_ranks
from torch_lowcomm.diloco.unnamed_replicas import look_of, warn_of_one_host, warn_of_unnamed
from torch_lowcomm.groups import backend_of
from torch_lowcomm.membership import Membership

_made = itertools.count()
_REPLICAS = ("replicas", "replicate", "dp_replicate")  # names of a mesh's dimension along ranks that hold the same


@dataclasses.dataclass(frozen=True)
class LoopGroups:
    """The groups of one outer loop, made for it alone, and the names of its state in checkpoints."""

    members: Membership | None  # forms the groups to average over; None where these are in `stripes`
    stripes: list[_C.LowcommBackend]  # the groups to average over, by stripe of this rank; none with a Membership
    site: _C.LowcommBackend | None  # of this site's ranks; None where this rank is a site by itself
    site_ranks: list[int]  # global, ascending
    parts: list[int]  # by rank of the site: the part of the model that it holds, 0, 1, ...
    part_stripes: list[int]  # by part: number of its stripes; empty for as many as ranks hold it
    shared: str  # key of the tensors that are equal on all ranks of a stripe
    own: str  # key of the tensors of this rank
    made: tuple[dist.ProcessGroup, ...]  # which end with their last reference

    @staticmethod
    def make(
        *,
        group: dist.ProcessGroup | Membership | None,
        cluster: dist.ProcessGroup | None,
        mesh: DeviceMesh | None,
        replicas: dist.ProcessGroup | None,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer,
    ) -> LoopGroups:
        """Makes a loop's groups, from arguments as DiLoCoX takes them. Collective over the group and over the site. A wrong
        type is a TypeError. Arguments that do not go together, a group of another backend, a mesh without this rank, a
        Membership of other ranks than the site, and a rank outside of the site that holds this rank's part of the model are
        ValueErrors.
        """
        tensors = parameters_of(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else []
        over, given, same = _chosen(group, cluster, mesh)
        ddp = model.process_group if isinstance(model, DistributedDataParallel) else None
        for alike in (replicas, ddp):
            same |= set() if alike is None else set(dist.get_process_group_ranks(alike))
        same |= ranks_of_ddp(tensors) | getattr(optimizer, "steps_with", set())  # QuantizedAdam's and SeedReplay's
        site, relatives = _site_of(over, given, replicas=same, tensors=tensors)
        members = over if isinstance(over, Membership) else None
        made: list[dist.ProcessGroup] = []
        stripes: list[_C.LowcommBackend] = []
        if members is not None:
            timeout = members.site_timeout
        else:
            # A second group of the same ranks: a loop's messages take minutes, and other ops must not wait for them.
            ranks = dist.get_process_group_ranks(over if over is not None else dist.group.WORLD)
            made.append(_new_group(ranks, backend_of(over).options._timeout))
            stripes.append(backend_of(made[0]))
            if len(site) == 1 and dist.get_rank() == ranks[0]:
                warn_of_one_host(rows_of(stripes[0]))
            timeout = 2 * stripes[0].options._timeout  # while one rank waits for another site, the others wait for it
        own_site, parts = None, [0]
        if len(site) > 1:
            made.append(_new_group(site, timeout))
            own_site = backend_of(made[-1])
            told = all_gather_json([sorted(relatives), look_of(tensors, without_ddp(model))], made[-1])
            parts = _parts([ranks for ranks, _ in told], site)
            if site[0] == dist.get_rank():
                warn_of_unnamed([look for _, look in told], parts, site, mesh)
        if members is None:
            # Parts may have tensors of the same names: the first rank of the group tells them apart.
            shared, own = f"outer{dist.get_process_group_ranks(made[0])[0]}", f"rank{dist.get_rank()}"
            return LoopGroups(None, stripes, own_site, site, parts, [], shared, own, tuple(made))
        part_stripes = _stripes_of_first(members, parts)
        place = "" if own_site is None else str(site.index(dist.get_rank()))
        own = f"{members.machine_id}.{place}" if place else members.machine_id
        return LoopGroups(members, stripes, own_site, site, parts, part_stripes, f"outer{place}", own, tuple(made))

    @property
    def for_core(self) -> dict[str, Any]:
        """The groups as `_C.DiLoCoX` takes them."""
        return {"stripes": self.stripes, "site": self.site, "parts": self.parts, "part_stripes": self.part_stripes}


def _chosen(
    group: dist.ProcessGroup | Membership | None, cluster: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> tuple[dist.ProcessGroup | Membership | None, list[int] | None, set[int]]:
    """Returns the group to average over; the global ranks of this site, or None where the arguments do not say; and those
    ranks that the mesh names as replicas of this one.
    """
    if mesh is None:
        if not isinstance(group, Membership):
            backend_of(group)  # raises where it is not of lowcomm
        if cluster is not None and not isinstance(cluster, dist.ProcessGroup):
            raise TypeError(f"DiLoCoX: cluster: expected a process group, got {type(cluster).__name__}")
        site = cluster if not isinstance(group, Membership) or cluster is not None else group.site
        return group, None if site is None else dist.get_process_group_ranks(site), set()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"DiLoCoX: mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if group is not None or cluster is not None:
        raise ValueError("DiLoCoX: expected a mesh, or group= and cluster=, got both")
    if mesh.ndim == 1:
        return mesh.get_group(0), None, set()
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError("DiLoCoX: mesh: expected one with this rank in it, got one without")
    names = mesh.mesh_dim_names or ()
    replicas = {
        rank
        for number, name in enumerate(names)
        if number > 0 and name in _REPLICAS
        for rank in dist.get_process_group_ranks(mesh.get_group(number))
    }
    return mesh.get_group(0), sorted(int(rank) for rank in mesh.mesh[place[0]].flatten()), replicas


def _site_of(
    over: dist.ProcessGroup | Membership | None,
    site: list[int] | None,
    *,
    replicas: Iterable[int],
    tensors: Iterable[torch.Tensor],
) -> tuple[list[int], set[int]]:
    """Returns the global ranks of this rank's site, ascending, and those among them that hold this rank's part of the model.
    Without a given `site` it has `replicas`, which DDP, the mesh or the caller names, and the ranks of DTensors.
    """
    if not dist.is_initialized():
        return [0], {0}
    me = dist.get_rank()
    relatives = {me, *replicas, *sharing_ranks(tensors)}
    if isinstance(over, Membership):
        together = sorted(relatives if site is None else {*site, *relatives})
        members = [me] if over.site is None else sorted(dist.get_process_group_ranks(over.site))
        if together != members:
            raise ValueError(
                f"DiLoCoX: group: expected a Membership that all ranks of this site have made with site=, {together}, got one "
                f"of the ranks {members}"
            )
        return members, relatives
    averaged = set(dist.get_process_group_ranks(over if over is not None else dist.group.WORLD))
    if relatives & averaged - {me}:
        raise ValueError(_no_sites(averaged, set(replicas) - {me}, sharing_ranks(tensors)))
    if site is None:
        return sorted(relatives), relatives
    if not relatives <= set(site):
        raise ValueError(
            f"DiLoCoX: cluster: expected all ranks of the site, those that hold this rank's part of the model among them, "
            f"{sorted(relatives)}, got {sorted(site)}"
        )
    return sorted(site), relatives


def _no_sites(averaged: set[int], replicas: set[int], shards: set[int]) -> str:
    """What to do where ranks that work together in every step were to be averaged with as sites of their own."""
    ways = "mesh= (a DeviceMesh whose first dimension goes along sites), or group= and cluster="
    if replicas & averaged:
        return (
            f"DiLoCoX: expected ranks that train separately between outer steps, got ranks {sorted(replicas & averaged)}, with "
            f"which this rank averages gradients in every step (DDP, QuantizedAdam, SeedReplay, or replicas=). Where every rank "
            f"is a site leave DDP out, or take another inner optimizer; where a site has several ranks give the ranks of this "
            f"site alone to DDP, as process_group=, or to the inner optimizer, as group=, and pass {ways}"
        )
    return (
        f"DiLoCoX: expected {ways} for parameters that FSDP2 shards over the ranks {sorted(shards)}, got the group of the ranks "
        f'{sorted(averaged)} to average over, whose shards differ. With init_device_mesh("cpu", (sites, ranks), '
        f'mesh_dim_names=("site", "shard")) as mesh: fully_shard(model, mesh=mesh["shard"]), and mesh=mesh here'
    )


def _new_group(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    made = dist.new_group(
        ranks,
        timeout=timeout,
        backend="lowcomm",
        pg_options=_C.Options(""),  # no policy: the loop encodes its messages itself
        use_local_synchronization=True,
        group_desc=f"lowcomm_outer_{next(_made)}",
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _parts(relatives: list[list[int]], site: Sequence[int]) -> list[int]:
    """Returns the part of each rank of the site: ranks that are relatives, or relatives of these, hold one part."""
    parts = list(range(len(site)))
    places = {rank: place for place, rank in enumerate(site)}
    for place, others in enumerate(relatives):
        for other in others:
            old, new = parts[places[other]], parts[place]
            parts = [min(old, new) if part in (old, new) else part for part in parts]
    numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    return [numbers[part] for part in parts]


def _stripes_of_first(members: Membership, parts: list[int]) -> list[int]:
    """Returns the number of stripes of each part: the first site that came has as many as ranks."""
    mine = [parts.count(part) for part in range(1 + max(parts))]
    first: list[int] = json.loads(members.first("stripes", json.dumps(mine)))
    if len(first) != len(mine):
        raise ValueError(
            f"DiLoCoX: expected a model in {len(first)} parts, as the other sites of this store have, got {len(mine)}"
        )
    return first
