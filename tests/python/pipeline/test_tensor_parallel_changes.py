"""Tensor parallelism with changes in place of activations, as the AQ-SGD paper's appendix F proposes: Q[Σ Q(A_i)].

Two ranks hold half of a linear layer's input each, so that its output is the sum of their parts A_0 + A_1. A part travels to the
rank that sums its half of the columns, and the sum travels back; both as changes since the sample's last visit.
"""

import itertools

import pytest
import torch

from torch_lowcomm import _C
from torch_lowcomm.groups import backend_of

ROWS, TOKENS, WIDTH, VISITS = 6, 8, 256, 6
SAMPLES = list(range(100, 100 + ROWS))


class Sum:
    """The sum of both ranks' tensors of shape [samples, tokens, width], which each rank computes for half of the columns."""

    def __init__(self, codec, remembers):
        backend = backend_of()
        self.me, elements = backend.rank(), TOKENS * WIDTH // 2
        self.memories = [_C.SampleMemory(elements, WIDTH // 2, "fp32") if remembers else None for _ in range(4)]
        names = {
            "dtype": torch.float32,
            "codec": codec,
            "first": "minmax8:bucket=128" if remembers else "",
            "channels": 1,
            "edge": "",
            "part": "",
        }
        peer = 1 - self.me
        # By the rank that sums: the parts on their way there, and the sums on their way back.
        self.parts = [_C.BoundaryChannel(backend, peer, 8 + i, memory=self.memories[i], **names) for i in (0, 1)]
        self.sums = [_C.BoundaryChannel(backend, peer, 16 + i, memory=self.memories[2 + i], **names) for i in (0, 1)]
        self.samples = SAMPLES if remembers else []
        self.codec = None if remembers else _C.Codec(codec)

    def _swap(self, channels, mine, receives):
        """Sends `mine` on one of two channels and receives on the other."""
        got = torch.empty_like(mine)
        waiting = channels[receives].recv(got, self.samples)
        sending = channels[1 - receives].send(mine, self.samples)
        waiting.wait()
        sending.wait()
        return got

    def __call__(self, part):
        halves = [half.contiguous() for half in part.chunk(2, -1)]
        mine, other = self.me, 1 - self.me
        total = halves[mine] + self._swap(self.parts, halves[other], receives=mine)
        theirs = self._swap(self.sums, total, receives=other)
        # The rank that made a sum uses what the other one has of it.
        memory = self.memories[2 + mine]
        if memory is None:
            total = self.codec.roundtrip(total.flatten()).view_as(total)
        else:
            total = torch.stack([memory.read(sample).view(torch.float32) for sample in SAMPLES]).view_as(total)
        return torch.cat((total, theirs) if mine == 0 else (theirs, total), -1)


def _visits(r, remembers):
    """Relative errors of the layer's output, visit by visit, while training converges: its steps halve."""
    r.init()
    summed, errors, outputs = Sum("gauss2", remembers), [], []
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, TOKENS, 2 * WIDTH, generator=generator)
    weight = torch.randn(2 * WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    for visit in range(VISITS):
        weight += torch.randn(2 * WIDTH, WIDTH, generator=generator) / WIDTH**0.5 * 0.2 * 0.5**visit
        half = slice(r.rank * WIDTH, (r.rank + 1) * WIDTH)
        y, exact = summed(x[..., half] @ weight[half]), x @ weight
        errors.append(((y - exact).norm() / exact.norm()).item())
        outputs.append(y)
    return errors, outputs


@pytest.mark.parametrize("remembers", [True, False], ids=["changes", "activations"])
def test_error_falls_from_visit_to_visit_with_changes_alone(pair, remembers):
    (errors, mine), (others, theirs) = pair(_visits, remembers)
    assert errors == others and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), "ranks differ"
    if remembers:
        # A change costs a third of its size at 2 bits, and the changes halve.
        assert all(later < 0.75 * earlier for earlier, later in itertools.pairwise(errors[1:])), errors
        assert errors[-1] < 0.01
    else:
        assert min(errors) > 0.3 and max(errors) / min(errors) < 1.1, errors
