"""A share of the bytes of FSDP2, which `steps` and `convergence fsdp_tables` time."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from fsdp_model import make_model, train
from torch.distributed.device_mesh import init_device_mesh

sys.path[:0] = [str(Path(__file__).parents[3] / folder) for folder in ("benchmarks", "examples")]  # of a pool's ranks


def _share(r, ratio, overlap):
    from steps.share import send_share

    import torch_lowcomm as lc

    r.init("lowcomm")
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
    send_share(lc.fsdp.quantize(model, overlap=overlap), dist.group.WORLD, ratio)
    lc.reset_stats()
    losses = train(r, model, 3)
    assert losses.isfinite().all()
    stats = lc.stats()[dist.group.WORLD.group_name]
    shards = [sum(-(-p.shape[0] // r.size) * p[0].numel() for p in block.parameters()) for block in model]
    sent = sum(4 * -(-n // ratio) for n in shards) * (r.size - 1)
    for op, times in (("all_gather", 6), ("reduce_scatter", 3)):
        assert times * sent <= stats[op]["wire_bytes"] <= 1.02 * times * sent + 4096, (op, stats[op])


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (7, False)])
def test_a_share_is_sent(pair, ratio, overlap):
    pair(_share, ratio, overlap)
