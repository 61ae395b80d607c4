"""Which ranks share a host, and with it the link that leaves it: a table of global ranks [hosts, ranks of a host]."""

import functools

import torch
from torch.distributed.device_mesh import DeviceMesh

from torch_lowcomm import _C
from torch_lowcomm._log import logger

AUTO, FLAT = "auto", "flat"


def hosts_of(
    who: str, backend: _C.LowcommBackend, hosts: DeviceMesh | str | list[list[int]], *, least: int = 2
) -> torch.Tensor | None:
    """Returns the table of a group's hosts; None where every rank is to send for itself.

    Args:
        who: Begins the errors.
        backend: The group's.
        hosts: "auto": what the machines' kernels say, if several hosts have several ranks, each as many; "flat": None; or a
            mesh of the group's ranks, whose first dimension goes along hosts; or the rows of a table, which a copy has.
        least: Hosts that a mesh has, or more.

    Raises:
        TypeError: `hosts` is of another type.
        ValueError: Another text, or a mesh of other dimensions or ranks, or of too few hosts.
    """
    if not isinstance(hosts, DeviceMesh | str | list):
        raise TypeError(f"{who}: hosts: expected {AUTO!r}, {FLAT!r} or a DeviceMesh, got {type(hosts).__name__}")
    if not isinstance(hosts, str):
        table = torch.tensor(hosts) if isinstance(hosts, list) else hosts.mesh.cpu()
        if table.ndim != 2:
            raise ValueError(f"{who}: hosts: expected a mesh [hosts, ranks of a host], got {table.ndim} dimensions")
        table = table.sort(dim=1).values  # as new_group numbers a host's ranks
        ranks = backend.options.global_ranks_in_group
        if sorted(table.flatten().tolist()) != sorted(ranks) or len(table) < least:
            raise ValueError(
                f"{who}: hosts: expected {least} hosts or more, of the group's ranks {ranks}, got {table.tolist()}"
            )
        return table
    if hosts == AUTO:
        rows = rows_of(backend)
        lengths = list(map(len, rows))
        if min(lengths) < max(lengths):
            _warn_of_unequal(who, max(lengths), str(lengths))
            return None
        return torch.tensor(rows) if len(rows) > 1 and lengths[0] > 1 else None
    if hosts != FLAT:
        raise ValueError(f"{who}: hosts: expected {AUTO!r}, {FLAT!r} or a DeviceMesh, got {hosts!r}")
    return None


def rows_of(backend: _C.LowcommBackend) -> list[list[int]]:
    """Returns the global ranks of each host of a group: hosts of one network namespace of one machine, as group members found."""
    rows: dict[str, list[int]] = {}
    for rank, host in zip(backend.options.global_ranks_in_group, backend.hosts, strict=True):
        rows.setdefault(host, []).append(rank)
    return list(rows.values())


@functools.cache
def _warn_of_unequal(who: str, most: int, lengths: str) -> None:
    logger.warning(
        "%s: hosts have %s ranks: each rank sends a copy of its own, up to %d over one host's link. With as many ranks on every "
        'host one copy a host is sent; hosts="flat" says that this is meant',
        who,
        lengths,
        most,
    )
