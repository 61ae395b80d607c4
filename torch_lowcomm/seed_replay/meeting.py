"""How an optimizer's arguments say where a machine meets the others: in a group, at a store, in another exchange, or alone."""

import dataclasses
from collections.abc import Sequence

import torch.distributed as dist

from torch_lowcomm.seed_replay.exchange import Alone, Exchange, StaticExchange
from torch_lowcomm.seed_replay.store import StoreExchange


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The arguments of these names, which `lc.SeedReplay` explains."""

    group: dist.ProcessGroup | None
    store: dist.Store | None
    machine_id: int | str | None
    exchange: Exchange | None

    def expect(self, ranks: Sequence[int]) -> str:
        """Checks that there is one way, and returns its name.

        Args:
            ranks: Global ranks of this machine where it has several.

        Raises:
            ValueError: There is more than one way, a part of one, or the group has another rank of this machine.
        """
        ways = {"group": self.group, "store": self.store, "exchange": self.exchange}
        given = [name for name, way in ways.items() if way is not None]
        if len(given) > 1:
            raise ValueError("SeedReplay: expected one of group, store and exchange, got more")
        if (self.store is None) != (self.machine_id is None):
            got = "machine_id alone" if self.store is None else "store alone"
            raise ValueError(f"SeedReplay: expected store and machine_id, got {got}")
        if self.group is not None and self.group != dist.GroupMember.NON_GROUP_MEMBER:
            others = sorted(set(dist.get_process_group_ranks(self.group)) & set(ranks) - {dist.get_rank()})
            if others:
                raise ValueError(
                    f"SeedReplay: group: expected one rank of each machine, got ranks {others} of this one too, whose parameters "
                    "are sharded together"
                )
        return f"{given[0]} {self.machine_id}" if given else "alone"

    def begin(self, *, samples: int | None) -> Exchange:
        """Returns the exchange. `samples`: this machine's in every iteration; None if their number changes.

        Raises:
            ValueError: This rank is not in the group.
        """
        if self.exchange is not None:
            return self.exchange
        if self.store is not None and self.machine_id is not None:
            return StoreExchange(self.store, self.machine_id)
        if self.group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("SeedReplay: group: expected one that this rank is in, got GroupMember.NON_GROUP_MEMBER")
        return Alone() if self.group is None else StaticExchange(self.group, samples=samples)
