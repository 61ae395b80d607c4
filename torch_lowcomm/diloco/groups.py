"""Chooses the group that an outer loop averages over, and makes a separate group with its ranks."""

from __future__ import annotations

import dataclasses
import itertools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_lowcomm import _C
from torch_lowcomm.groups import backend_of
from torch_lowcomm.membership import Membership

_made = itertools.count()


@dataclasses.dataclass(frozen=True)
class LoopGroups:
    """The groups of one outer loop, made for it alone, and the names of its state in checkpoints.

    Attributes:
        backend: Backend of the group to average over; None with a Membership, which forms groups later.
        cluster: Backend of the group of the other shards or stages of this rank's model, or None.
        shared: Key of the tensors that are equal on all ranks of the group.
        own: Key of the tensors of this rank.
        made: The groups themselves, which end with their last reference.
    """

    backend: _C.LowcommBackend | None
    cluster: _C.LowcommBackend | None
    shared: str
    own: str
    made: tuple[dist.ProcessGroup, ...]

    @staticmethod
    def make(over: dist.ProcessGroup | Membership | None, parts: dist.ProcessGroup | None) -> LoopGroups:
        """Makes a loop's groups of what `chosen` returned. Collective over both.

        Raises:
            ValueError: A group is not of backend lowcomm.
        """
        shared, own, backend, made = "outer", "", None, []
        if isinstance(over, Membership):
            own = over.machine_id
        else:
            group, backend = own_backend(over)
            # Other shards and stages may have tensors of the same names: the first rank of the group tells them apart.
            shared, own = f"outer{dist.get_process_group_ranks(group)[0]}", f"rank{dist.get_rank()}"
            made.append(group)
        cluster = None
        if parts is not None:
            group, cluster = own_backend(parts)
            made.append(group)
        return LoopGroups(backend, cluster, shared, own, tuple(made))


def chosen(
    group: dist.ProcessGroup | Membership | None, cluster: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> tuple[dist.ProcessGroup | Membership | None, dist.ProcessGroup | None]:
    """Chooses the groups from the arguments of an outer loop.

    Returns:
        (the group to average over, the group of the other shards or stages of this rank's model, or None).

    Raises:
        TypeError: `mesh` is not a DeviceMesh.
        ValueError: Both a mesh and a group were given, or the mesh has more than two dimensions.
    """
    if mesh is None:
        return group, cluster
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"DiLoCoX: mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if group is not None or cluster is not None:
        raise ValueError("DiLoCoX: expected a mesh, or group= and cluster=, got both")
    if mesh.ndim > 2:
        raise ValueError(
            f"DiLoCoX: mesh: expected one or two dimensions, replicas and the parts of a model, got {mesh.ndim}"
        )
    return mesh.get_group(0), mesh.get_group(1) if mesh.ndim == 2 else None


def own_backend(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, _C.LowcommBackend]:
    """Makes a new group of the same ranks for an outer loop alone: its messages take minutes, and other ops must not wait.

    Collective over the group.

    Returns:
        (the new group, its backend).

    Raises:
        ValueError: The group is not of backend lowcomm.
    """
    options = backend_of(group).options
    made = dist.new_group(
        dist.get_process_group_ranks(group if group is not None else dist.group.WORLD),
        timeout=options._timeout,
        backend="lowcomm",
        pg_options=_C.Options(""),  # no policy: the loop encodes its messages itself
        use_local_synchronization=True,
        group_desc=f"lowcomm_outer_{next(_made)}",
    )
    assert isinstance(made, dist.ProcessGroup)
    return made, backend_of(made)
