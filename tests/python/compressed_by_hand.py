"""The results that the compressed ops must give, put together by hand from the codec alone.

all_gather: each part is the owner's decoded value, on the owner too. reduce_scatter: fp32 sums in rank order of the others'
decoded contributions and the own one as it is; AVG divides after the sum, PREMUL_SUM multiplies before the encoding.
The n-th op of a group draws with step n, tensor i of an op in slot i (all_gather) or i*W + destination (reduce_scatter).
"""

import torch
import torch.distributed as dist
from collective_cases import bits
from format_reader.filling import fnv1a
from noise_by_hand import seed_of

import torch_lowcomm as lc

SEED = 11


def options(policy, **fields):
    return lc.Options(**{"policy": policy, "min_bytes": 0, "seed": SEED, "chunk_bytes": 65536, **fields})


def last_step():
    """The sequence number that the last op had."""
    return dist.group.WORLD._get_backend(torch.device("cpu"))._get_sequence_number_for_group()


def draw_key(seed=SEED, group=None):
    """Returns the key of a group's draws, from FORMAT.md's words: splitmix64 of the seed and the hash of the group's name."""
    name = (group or dist.group.WORLD).group_name
    return seed_of((seed + fnv1a(name)) % 2**64)


def gathered_by_hand(codec, case, counts, step):
    """Every rank's part of every tensor, decoded: [tensor][rank]."""
    return [
        [
            codec.roundtrip(case.x(i, n, rank=q), seed=draw_key(), stream=(q << 16) + i, step=step)
            for q in range(case.size)
        ]
        for i, n in enumerate(counts)
    ]


def scattered_by_hand(codec, case, slices, step, *, average=False, factor=None):
    """This rank's sum: `slices(q)` is what rank q contributes to it, with the slot it is encoded in."""
    total = None
    for q in range(case.size):
        x, slot = slices(q)
        if factor is not None:
            x = x * factor
        if q != case.rank:
            payload = codec.encode(x, seed=draw_key(), stream=(q << 16) + slot, step=step)
            x = codec.decode(payload, x.numel())
        total = x.float() if total is None else total + x.float()
    return total / case.size if average else total


def differs(label, got, want):
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{label}: expected {want.dtype}{list(want.shape)}, got {got.dtype}{list(got.shape)}"]
    if not torch.equal(bits(got), bits(want)):
        bad = (got != want).nonzero().flatten()
        return [f"{label}: {bad.numel()} of {got.numel()} differ, first at {bad[:3].tolist()}"]
    return []


def check_gathered(r, x, how, codec=None):
    """Gathers x; checks whether it went exact or through the codec."""
    out = torch.empty(x.numel() * r.size, dtype=x.dtype)
    dist.all_gather_into_tensor(out, x)
    mine = out[x.numel() * r.rank : x.numel() * (r.rank + 1)]
    want = x if how == "exact" else codec.roundtrip(x, seed=draw_key(), stream=r.rank << 16, step=last_step())
    assert torch.equal(bits(mine), bits(want)), f"expected {how}: {x.dtype} of {x.numel()}"


def slices_of(n, unit, size):
    """[first, end) of every rank's slice (FORMAT.md, "Slices")."""
    units = -(-n // unit)
    length = -(-units // size) * unit
    return [(min(n, q * length), min(n, (q + 1) * length)) for q in range(size)]


def unit_of(codec):
    return 512 if codec.spec.startswith("topk") else max(codec.bucket, 512)


def reduced_by_hand(codec, contributions, step, *, average=False, slot=0):
    """Returns the result of an all_reduce of one flat tensor, in its own dtype."""
    size, n = len(contributions), contributions[0].numel()
    out = torch.empty_like(contributions[0])

    def coded(x, rank, owner, again=0):
        stream = (again << 30) + (rank << 16) + slot + owner
        return codec.decode(codec.encode(x, seed=draw_key(), stream=stream, step=step), x.numel())

    for owner, (first, end) in enumerate(slices_of(n, unit_of(codec), size)):
        total = None
        for q, x in enumerate(contributions):
            part = x[first:end]
            part = (part if q == owner else coded(part, q, owner)).float()
            total = part if total is None else total + part
        total = total / size if average else total
        out[first:end] = coded(total, owner, owner, again=1)
    return out
