"""Whether a group works: what a test asks after it did something to one."""

import torch
import torch.distributed as dist


def exception_of(work):
    """A completed Work's exception, or None. Torch 2.11 and 2.12 cannot hand one to Python: there its success says whether."""
    try:
        return work.exception()
    except TypeError:
        return None if work.is_success() else RuntimeError("one that this torch does not show")


def check_group(r, group=None, members=None):
    """Three ops on a group; every result checked."""
    members = list(range(r.size)) if members is None else members
    n, me = len(members), members.index(r.rank)
    out = torch.empty(3 * n)
    dist.all_gather_into_tensor(out, torch.full((3,), float(r.rank)), group=group)
    assert torch.equal(out, torch.tensor(members, dtype=torch.float32).repeat_interleave(3)), out
    mine = torch.empty(2)
    dist.reduce_scatter_tensor(mine, torch.arange(2.0 * n), group=group)
    assert torch.equal(mine, n * torch.arange(2.0 * me, 2.0 * me + 2)), mine
    t = torch.ones(4)
    dist.all_reduce(t, group=group)
    assert torch.equal(t, torch.full((4,), float(n))), t
