"""FSDP2 with coded weights and gradients learns on the device as on the host, and ranks agree, by codes and by copies."""

import time

import device_trainings as trainings
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc

LAYERS, STEPS, BATCH = 4, 12, 64


def fsdp2(t):
    facts = {"seconds_a_step": {"staged" if on else "copied": _train(t, on) for on in (True, False)}}
    t.init()
    return facts | t.compare(trainings.fsdp2, trainings.fsdp2_without_overlap)


def _train(t, staged):
    """The median step's seconds."""
    t.init(encode_on_device=staged)
    torch.manual_seed(0)
    width = t.either(1024, 64)
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(LAYERS)]
    ).to(t.device)
    mesh = init_device_mesh(t.device.type, (t.size,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    lc.fsdp.quantize(model, weights="minmax8:bucket=1024", gradients="qsgd8:bucket=1024")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(t.rank)).to(t.device)  # learnt by heart
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.monotonic()
        loss = (model(x) - x.roll(1, 0).relu()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.monotonic() - start)
    assert losses[-1] < 0.9 * losses[0], losses
    assert t.same_on_both_ranks([parameter.full_tensor() for parameter in model.parameters()]), "the ranks differ"
    if t.cuda:
        stats = t.stats("all_gather")
        assert (stats["staged_calls"] > 0) == staged, stats
    return sorted(seconds)[STEPS // 2]
