"""lc.fsdp.quantize(fake=γ): a share of the bytes, loudly."""

import logging

import pytest
import torch
import torch.distributed as dist
from fsdp_model import make_model, train
from torch.distributed.device_mesh import init_device_mesh


def _fake(r, ratio, overlap):
    import torch_lowcomm as lc

    r.init("lowcomm")
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logging.getLogger("torch_lowcomm").addHandler(handler)
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
    lc.fsdp.quantize(model, fake=ratio, overlap=overlap)
    logging.getLogger("torch_lowcomm").removeHandler(handler)
    assert any(level == "WARNING" and "RESULTS ARE WRONG" in text for level, text in said), said
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
    pair(_fake, ratio, overlap)


def _refused(r):
    import torch_lowcomm as lc

    r.init("lowcomm")
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
    for ratio in (1, 0, -4, 2.0, True):
        with pytest.raises(ValueError, match="fake: expected a whole number of 2 or more"):
            lc.fsdp.quantize(model, fake=ratio)
    with pytest.raises(ValueError, match="fake4"):
        lc.fsdp.quantize(model, weights="fake4")
    with pytest.raises(dist.DistBackendError, match="fake"):
        lc.fsdp.quantize(model, fake=4 + r.rank)
    lc.fsdp.quantize(model)
    assert torch.isfinite(train(r, model, 1)).all()


def test_what_is_refused(pair):
    pair(_refused)
