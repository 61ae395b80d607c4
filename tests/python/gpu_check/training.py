"""A GPT of 125 million parameters on two ranks of one GPU for some minutes a run: loss against seconds, for the record."""

import itertools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc
from gpu_check.trial import Trial

sys.path.append(str(Path(__file__).parents[3] / "examples"))

import data
from model import GPT, Config

RUNS = ("exact", "8 bits", "DiLoCoX")
SIZES = {"cuda": (Config(width=928, layers=12, heads=16, context=512), 16), "cpu": (Config(), 4)}
POINT = 10  # steps a point of the curve
INNER_STEPS = 20


def on_this_rank(rank, run, device, seconds):
    """{"parameters", "curve": [[seconds, step, loss], …]}, the loss a mean over both ranks and POINT steps."""
    t = Trial(rank, device)
    t.init(encode_on_device=t.cuda)
    config, batch = SIZES[device]
    torch.manual_seed(0)
    model = GPT(config).to(t.device, torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(_prepared(model, run, t), lr=3e-4)
    if run == "DiLoCoX":
        optimizer = lc.DiLoCoX(optimizer, INNER_STEPS, model=model, codec="sym4:bucket=1024")
    corpus = data.load(context=config.context).to(t.device)
    start, total, curve = time.monotonic(), torch.zeros((), device=t.device), []
    for step in itertools.count(1):
        loss = model(*corpus.batch(batch, config.context, seed=0, step=step, rank=t.rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach().float() / POINT
        if step % POINT:
            continue
        with lc.exact():
            point = torch.tensor([total.item() / t.size, time.monotonic() - start])
            dist.all_reduce(point)
        curve.append([round(float(point[1]) / t.size, 2), step, round(float(point[0]), 4)])
        total.zero_()
        if len(curve) > 1 and curve[-1][0] >= seconds:  # a loss that falls takes two
            break
    t.end()
    return {"parameters": parameters, "curve": curve}


def _prepared(model, run, t):
    """The parameters to train, of a model that is sharded but for DiLoCoX."""
    if run != "DiLoCoX":
        mesh = init_device_mesh(t.device.type, (t.size,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        if run == "8 bits":
            lc.fsdp.quantize(model)
    return model.parameters()
