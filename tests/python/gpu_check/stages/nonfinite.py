"""A NaN of one rank is told as on the host, or arrives everywhere under `poison`; the group lives on."""

import torch
import torch.distributed as dist

N, AT, BUCKET = 300_000, 77_777, 64


def _with_a_nan(t, device, at):
    x = torch.ones(N, device=device)
    if t.rank == 1:
        x[at] = float("nan")
    return x


def _told(t, device, at):
    """The error's text, without what differs from op to op."""
    expected = ValueError if t.rank == 1 else dist.DistBackendError
    try:
        dist.all_gather_into_tensor(torch.empty(N * t.size, device=device), _with_a_nan(t, device, at))
    except expected as error:
        return str(error).split(" [op")[0]
    raise AssertionError(f"element {at} on {device}: expected {expected.__name__}, got none")


def nonfinite(t):
    t.init(policy="all_gather=sym4; all_reduce=sym4")
    for at in (3, N - 1):
        texts = {_told(t, device, at) for device in t.devices}
        assert len(texts) == 1, texts
        assert "nan" in texts.pop()
    dist.all_reduce(torch.ones(N, device=t.device))
    t.init(policy=f"all_reduce=sym4:bucket={BUCKET},nonfinite=poison")
    x = _with_a_nan(t, t.device, AT)
    dist.all_reduce(x)
    first = AT // BUCKET * BUCKET
    assert x.isnan().nonzero().flatten().tolist() == list(range(first, first + BUCKET))
