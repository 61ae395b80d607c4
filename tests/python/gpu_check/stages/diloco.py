"""An outer loop around parameters on the device moves them as one on the host does, bit for bit."""

import torch

import torch_lowcomm as lc
from gpu_check.trial import GivenGradients, flat

LOOPS = (
    {"codec": "sym4:bucket=128"},
    {"codec": "sym4:bucket=128", "rank": 4, "mode": "restart"},
    {"codec": "none", "mode": "sync"},
    {"codec": "gauss2", "fragments": 2},
)
EVERY, STEPS = 5, 22


def diloco(t):
    t.init()
    for options in LOOPS:
        ended = {}
        for device in t.devices:
            model = GivenGradients((256, 256), (256,), (300, 100)).to(device)
            inner = torch.optim.SGD(model.parameters(), lr=0.01)
            optimizer = lc.DiLoCoX(inner, EVERY, model=model, **options)
            for step in range(STEPS):
                model(step, t.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            ended[device] = flat(model)
        assert ended["cpu"].equal(ended[t.device.type]), f"{options}: the device's parameters differ from the host's"
