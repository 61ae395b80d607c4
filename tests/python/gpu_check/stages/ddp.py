"""Gradients that lc.ddp sums on the device are the host's bit for bit, with error feedback and in several buckets."""

import torch
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc
from gpu_check.trial import GivenGradients, flat

STATES = (
    {"codec": "sym4:bucket=128"},
    {"codec": "sym4:bucket=128", "residual_dtype": "int8"},
    {"codec": "sym8:bucket=128", "rank": 4},
)
SHAPES = ((512, 512), (512,), (256, 1024), (1024,), (1500, 300), (17,))


def ddp(t):
    t.init()
    for options in STATES:
        models = {device: GivenGradients(*SHAPES).to(device) for device in t.devices}
        wrapped = {}
        for device, model in models.items():
            wrapped[device] = DistributedDataParallel(model, bucket_cap_mb=1)
            wrapped[device].register_comm_hook(lc.ddp.State(model=model, **options), lc.ddp.hook)
        for step in range(t.either(6, 2)):
            for device, model in models.items():
                wrapped[device](step, t.rank).backward()
                with torch.no_grad():
                    for parameter in model.parameters():  # at once: a hook that does not wait leaves the old values
                        parameter.sub_(parameter.grad, alpha=0.01)
                        parameter.grad = None
        here, there = flat(models["cpu"]), flat(models[t.device.type])
        assert here.equal(there), f"{options}: {int((here != there).sum())} of {here.numel()} differ from the host"
        assert t.same_on_both_ranks([there]), f"{options}: the ranks differ"
