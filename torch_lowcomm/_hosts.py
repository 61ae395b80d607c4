"""Tells which ranks share a host, from a mesh or from torchrun's variables."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def hosts_of_mesh(mesh: DeviceMesh, inside: str, between: str) -> torch.Tensor:
    """Returns the global ranks [hosts, ranks of a host] of a mesh.

    Args:
        mesh: A mesh of two named dimensions.
        inside: Name of the dimension along a host's ranks.
        between: Name of the dimension along hosts.

    Raises:
        ValueError: The mesh has other dimensions, or this rank is not in it.
    """
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 2 or set(names) != {inside, between}:
        raise ValueError(
            f"TwoLevel: expected a mesh of the two dimensions {between!r} and {inside!r}, got {mesh.ndim} named {names}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"TwoLevel: expected a mesh with rank {dist.get_rank()} in it, got {mesh.mesh.tolist()}")
    table = mesh.mesh.cpu()
    return table if names[0] == between else table.t()


def hosts_of_environment() -> torch.Tensor:
    """Returns the global ranks [hosts, ranks of a host] from torchrun's variables LOCAL_WORLD_SIZE and LOCAL_RANK.

    Collective: every rank gets the variables of all ranks, so that all raise or none.

    Raises:
        ValueError: A variable is missing on a rank, hosts have different numbers of ranks, or a rank is not in its place.
    """
    said = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    mine = torch.tensor([int(text) if text.isdigit() else -1 for text in said])
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    size, local = len(everybodys), int(everybodys[0][0])
    for rank, (found, place) in enumerate(row.tolist() for row in everybodys):
        if found < 1 or found != local:
            first, has = (str(count) if count >= 1 else "none" for count in (local, found))
            raise ValueError(
                f"TwoLevel: expected as many ranks on every host, got LOCAL_WORLD_SIZE {first} on rank 0 and {has} on rank "
                f"{rank} (torchrun sets it)"
            )
        if place != rank % local:
            raise ValueError(
                f"TwoLevel: expected LOCAL_RANK {rank % local} on rank {rank} of hosts of {local}, got {place}"
            )
    if size % local:
        raise ValueError(
            f"TwoLevel: expected a world of full hosts of LOCAL_WORLD_SIZE {local} ranks, got {size} ranks"
        )
    return torch.arange(size).view(-1, local)
