"""The memory of an op while it runs, by the process's own peak: encoded size + one fp32 chunk + two chunks a peer."""

import pathlib

import pytest
import torch
import torch.distributed as dist

import torch_lowcomm as lc

CODEC = "sym4:bucket=1024"
N = 16 << 20  # elements of the tensor, fp32: 64 MiB
SLACK = 1 << 20  # what else a process touches meanwhile: stacks, the allocator's own
SELF = pathlib.Path("/proc/self")


def _resident(field):
    """VmRSS (now) or VmHWM (its peak since _reset_peak), in bytes."""
    lines = SELF.joinpath("status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _reset_peak():
    SELF.joinpath("clear_refs").write_text("5")


def _exchange(g, x, y):
    right, left = (g.rank() + 1) % g.size(), (g.rank() - 1) % g.size()
    ops = [dist.P2POp(dist.irecv, y, group=g, group_peer=left), dist.P2POp(dist.isend, x, group=g, group_peer=right)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


# The ops on the whole tensor x and another one, y.
OPS = {
    "all_reduce": lambda g, x, y: dist.all_reduce(x, group=g),
    "all_gather": lambda g, x, y: dist.all_gather_into_tensor(x, y[: x.numel() // g.size()], group=g),
    "reduce_scatter": lambda g, x, y: dist.reduce_scatter_tensor(y[: x.numel() // g.size()], x, group=g),
    "all_to_all": lambda g, x, y: dist.all_to_all_single(y, x, group=g),
    "p2p": _exchange,
}


@pytest.mark.later
@pytest.mark.on(2, 4, 8, timeout=180)
def test_an_op_takes_little_memory_beside_its_tensors(r):
    r.init("lowcomm")
    codec = lc.codec(CODEC)
    x, y = torch.randn(N, generator=torch.Generator().manual_seed(r.rank)), torch.ones(N)
    for name, op in OPS.items():
        # A group of its own: buffers are kept for the next op.
        group = dist.new_group(pg_options=lc.Options(policy=f"{name}={CODEC}", min_bytes=0))
        op(group, x[: 1 << 16], y[: 1 << 16])  # code, threads and connections are there
        dist.barrier()
        message = N if name == "p2p" else N // r.size
        chunk = min(256 << 10, max(64 << 10, codec.encoded_bytes(message) // 32))
        encoded = codec.encoded_bytes(N) * (2 if name == "p2p" else 1)  # an exchange is two ops, a message each way
        bound = encoded + chunk * 8 + 2 * chunk * (r.size - 1)
        _reset_peak()
        before = _resident("VmRSS")
        op(group, x, y)
        extra = _resident("VmHWM") - before
        print(f"{name}, {r.size} ranks: {extra / 2**20:.2f} MiB, bound {bound / 2**20:.2f}", flush=True)
        assert extra <= bound + SLACK, f"{name}: expected at most {bound} + {SLACK} bytes, got {extra}"
        dist.destroy_process_group(group)
