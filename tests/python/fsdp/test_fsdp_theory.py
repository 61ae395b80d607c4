"""QSDP's analysis of quantized iterates on toys: x_{t+1} = Q(x_t - eta/beta·f'(x_t)) with an absolute step delta.

The random shift of Definition 1 (`lattice`) is unbiased with variance delta^2/12 for every x, and that is what makes
the iteration converge; to the nearest point of the same grid it stops where updates are under half a step.
"""

import math

import pytest
import torch

import torch_lowcomm as lc

SEEDS = 16


def _nearest(delta):
    return lambda y, seed, step: delta * torch.round(y / delta)


def _rounded(family, delta, y, **draws):
    """Rounds y by a codec of 8 bits in one bucket, so with one shift. Two elements more, its ends, make its step delta."""
    ends = torch.tensor([-127.5 * delta, 127.5 * delta])
    return lc.codec(f"{family}8:bucket=1024").roundtrip(torch.cat([y, ends]), **draws)[:-2]


def _shifted(delta):
    return lambda y, seed, step: _rounded("lattice", delta, y, seed=seed, step=step)


def _iterate(gradient, x, quantize, rate, steps, seed=0):
    for step in range(steps):
        x = quantize(x - rate * gradient(x), seed, step)
    return x


def test_the_shift_is_unbiased_with_its_variance_for_every_x():
    delta = 0.125
    x = torch.linspace(-1, 1, 101)
    errors = torch.stack([_shifted(delta)(x, seed, 0) - x for seed in range(4000)])
    assert errors.abs().max() <= 0.5002 * delta
    # Of a mean of 4000: five standard errors.
    assert errors.mean(0).abs().max() < 5 * delta / math.sqrt(12 * 4000)
    assert (errors.square().mean(0) * 12 / delta**2 - 1).abs().max() < 0.1


@pytest.mark.parametrize("condition", [1.0, 2.0])
def test_theorem_2_on_a_quadratic(condition):
    """As stated, with exact gradients (sigma 0, eta 1): as good as the best points of a grid 16 condition^2 times as coarse.

    f = sum h/2·(x - c)^2: its minimizer on a shifted grid of step s is the nearest point, at an expected h·s^2/24.
    """
    n, alpha = 64, 0.5
    beta = alpha * condition
    h = torch.linspace(alpha, beta, n)
    centre = torch.randn(n, generator=torch.Generator().manual_seed(3)).clamp(-0.9, 0.9)  # within what 8 bits span
    coarse = 0.5
    delta = coarse / math.ceil(16 * condition**2)
    best = h.sum().item() * coarse**2 / 24
    start, epsilon = torch.zeros(n), 0.01 * best
    f = lambda x: (h / 2 * (x - centre).square()).sum().item()  # noqa: E731
    steps = math.ceil(10 * condition * math.log((f(start) - best) / epsilon))
    quantize = _shifted(delta)
    ends = [f(_iterate(lambda x: h * (x - centre), start, quantize, 1 / beta, steps, seed)) for seed in range(SEEDS)]
    assert f(start) > 10 * best
    assert sum(ends) / SEEDS <= best + epsilon


def _f(x):
    return (x.square() + 3 * x.sin().square()).sum().item()


def _gradient(x):
    return 2 * x + 3 * (2 * x).sin()


def test_the_shift_converges_where_nearest_stops():
    """f = sum x^2 + 3·sin(x)^2, not convex, 8-smooth and 1/32-PL (Karimi, Nutini, Schmidt 2016), with its minimum 0 at 0.

    A step of 1/8 eta makes f(y) <= (1 - eta·alpha/beta)·f(x), the shift adds at most beta/2·n·delta^2/12 in expectation: the
    iterates end within n·beta^2·delta^2 / (24·eta·alpha). The nearest point stays where |f'| < beta·delta / (2·eta).
    """
    n, alpha, beta = 64, 1 / 32, 8.0
    eta, delta = 0.05, 0.024
    bound = n * beta**2 * delta**2 / (24 * eta * alpha)
    start = _nearest(delta)(torch.linspace(2.12, 2.26, n), 0, 0)
    assert _f(start) > 2 * bound

    stopped = _iterate(_gradient, start, _nearest(delta), eta / beta, 1000)
    assert torch.equal(stopped, start)
    ends = [_f(_iterate(_gradient, start, _shifted(delta), eta / beta, 1000, seed)) for seed in range(SEEDS)]
    assert sum(ends) / SEEDS <= bound
    assert max(ends) < _f(stopped) / 2


def test_quantized_gradients_add_their_variance():
    """Corollary 3's iteration, x <- Q_w(x - eta/beta·Q_g(f'(x))), Q_g the coin of Definition 12: variance below step^2/4."""
    n, alpha, beta = 64, 1 / 32, 8.0
    eta, delta, coin = 0.05, 0.024, 0.05
    added = beta / 2 * n * delta**2 / 12 + eta**2 / (2 * beta) * n * coin**2 / 4
    bound = added * beta / (eta * alpha)
    start = torch.linspace(2.12, 2.26, n)
    assert _f(start) > 2 * bound
    ends = []
    for seed in range(SEEDS):
        x, quantize = start, _shifted(delta)
        for step in range(1000):
            estimate = _rounded("qsgd", coin, _gradient(x), seed=seed, stream=1, step=step)  # draws of its own
            x = quantize(x - eta / beta * estimate, seed, step)
        ends.append(_f(x))
    assert sum(ends) / SEEDS <= bound
