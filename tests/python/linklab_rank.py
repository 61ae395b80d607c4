"""A rank on a host of a lab, started as torchrun starts one: `linklab_rank.py collectives|long OUTPUT`."""

import json
import os
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist

import torch_lowcomm as lc

N = 1 << 20  # fp32 elements of a rank
CODED = "sym4:bucket=1024"


def normal(rank, elements):
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank))


def sent():
    lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:"))


def collectives(rank, size):
    """By op and codec: the interface's and the library's count of a stretch of calls; results are checked here."""
    gloo, calls, found = dist.group.WORLD, 2, {}
    shards = [normal(r, N // size) for r in range(size)]
    inputs = [normal(r, N) for r in range(size)]
    parts = [whole.chunk(size)[rank] for whole in inputs]
    codec = lc.codec(CODED)
    gathered, reduced = torch.empty(N), torch.empty(N // size)
    dist.all_gather_into_tensor(gathered, shards[rank], group=gloo)
    dist.reduce_scatter_tensor(reduced, inputs[rank], group=gloo)
    expected = {
        ("all_gather", ""): gathered.clone(),
        ("reduce_scatter", ""): reduced.clone(),
        ("all_gather", CODED): torch.cat([codec.roundtrip(shard) for shard in shards]),
        # In rank order; this rank's own part has not been coded.
        ("reduce_scatter", CODED): sum(
            part if r == rank else codec.roundtrip(part.contiguous()) for r, part in enumerate(parts)
        ),
    }
    for (op, spec), value in expected.items():
        policy = f"{op}={spec}" if spec else ""
        group = dist.new_group(backend="lowcomm", pg_options=lc.Options(policy=policy, min_bytes=0))
        dist.barrier(group=gloo)
        before = sent()
        for _ in range(calls):
            if op == "all_gather":
                got = torch.empty(N)
                dist.all_gather_into_tensor(got, shards[rank], group=group)
            else:
                got = torch.empty(N // size)
                dist.reduce_scatter_tensor(got, inputs[rank], group=group)
            assert torch.equal(got, value), f"{op} {spec}: off by {(got - value).abs().max()}"
        dist.barrier(group=gloo)  # all has arrived, so that it has passed the interface
        stats = lc.stats(group)[group.group_name][op]
        assert stats["exact_calls"] == (0 if spec else calls), stats
        found[f"{op} {spec}".strip()] = {"interface": sent() - before, "counted": stats["wire_bytes"]}
    return found


def long(rank, size):
    """Exact gathers of several seconds on a slow link, for a test to cut it meanwhile; how many were right."""
    group = dist.new_group(backend="lowcomm")
    shards = [normal(r, 2 * N) for r in range(size)]
    expected, right = torch.cat(shards), 0
    for _ in range(4):
        got = torch.empty(2 * N * size)
        dist.all_gather_into_tensor(got, shards[rank], group=group)
        right += torch.equal(got, expected)
    return right


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    what, output = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answer = {"collectives": collectives, "long": long}[what](dist.get_rank(), dist.get_world_size())
    pathlib.Path(f"{output}{os.environ['RANK']}").write_text(json.dumps(answer))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # plain gloo may abort at the end of its process, when all is done
