"""Over whom an outer loop averages, and the queue of its own that it gets there."""

from __future__ import annotations

import itertools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_lowcomm import _C
from torch_lowcomm.groups import backend_of
from torch_lowcomm.membership import Membership

_made = itertools.count()


def chosen(
    group: dist.ProcessGroup | Membership | None, cluster: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> tuple[dist.ProcessGroup | Membership | None, dist.ProcessGroup | None]:
    """The group to average over, and that of the other shards or stages of this rank's model, if any.

    Raises:
        TypeError: `mesh` is none.
        ValueError: A mesh beside a group, or one of more than two dimensions.
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
    """A new group of the same ranks, for an outer loop alone: its messages take minutes, and others' must not wait.

    Collective over the group.

    Raises:
        ValueError: The group is not of backend lowcomm.
    """
    options = backend_of(group).options
    made = dist.new_group(
        dist.get_process_group_ranks(group if group is not None else dist.group.WORLD),
        timeout=options._timeout,
        backend="lowcomm",
        pg_options=_C.Options(""),  # what the loop sends it encodes itself
        use_local_synchronization=True,
        group_desc=f"lowcomm_outer_{next(_made)}",
    )
    assert isinstance(made, dist.ProcessGroup)
    return made, backend_of(made)
