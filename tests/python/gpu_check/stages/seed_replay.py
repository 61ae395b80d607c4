"""Seed replay moves weights on the device as on the host, bit for bit, in every type, noise and way to perturb."""

import itertools

import torch

import torch_lowcomm as lc
from gpu_check.trial import GivenGradients, flat

ITERATIONS, SAMPLES = 4, 4


def seed_replay(t):
    t.init()
    for noise, dtype, perturb in itertools.product(
        ("rademacher", "gaussian"), (torch.float32, torch.bfloat16, torch.float16), ("at-use", "in-place")
    ):
        ended = {}
        for device in t.devices:
            model = GivenGradients((333, 77), (1000,), (64, 64)).to(dtype).to(device)
            optimizer = lc.SeedReplay(model, lr=1e-2, samples=SAMPLES, noise=noise, perturb=perturb)
            for _ in range(ITERATIONS):
                # A loss of the sample's and the evaluation's own, which no device computes.
                calls = itertools.count()
                optimizer.step(lambda sample, calls=calls: torch.tensor(1 + 0.01 * ((7 * sample + next(calls)) % 13)))
            ended[device] = flat(model).float()
        assert ended["cpu"].equal(ended[t.device.type]), f"{noise} {dtype} {perturb}: differs from the host"
