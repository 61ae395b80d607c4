"""What the tests of coded send and recv share: a group with a p2p policy, neighbours on a ring, equality of bits."""

import torch
import torch.distributed as dist
from collective_cases import bits
from compressed_by_hand import options

SPEC = "sym4:bucket=1024"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def neighbours(r):
    return (r.rank + 1) % r.size, (r.rank - 1) % r.size


def init(r, spec=SPEC, **fields):
    import torch_lowcomm as lc

    r.init("lowcomm", pg_options=options(f"p2p={spec}", **fields))
    lc.reset_stats()
    return lc.codec(spec)


def stats():
    import torch_lowcomm as lc

    return lc.stats()[dist.group.WORLD.group_name]


def same(got, want, about=""):
    assert torch.equal(bits(got), bits(want)), about
