"""The small DDP model that the tests of lc.ddp share, how they train it and what they note of its gradients."""

import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc

WIDTH = 48


class Net(nn.Module):
    """Matrices that are coded, and norms, biases and a small matrix that are not."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.spare = nn.Linear(2 * WIDTH, 2 * WIDTH)  # only where forward is asked to
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.small = nn.Linear(WIDTH, 7)

    def forward(self, x, spare=False):
        h = torch.relu(self.norm(self.up(x)))
        if spare:
            h = h + self.spare(h)
        return self.small(torch.relu(self.down(h)))


CODED = ("up.weight", "spare.weight", "down.weight")


def make(state=None, *, hook=lc.ddp.hook, bucket_cap_mb=0.01, unused=False, **ddp):
    """A DDP model with small buckets and, where there is a state, its hook."""
    torch.manual_seed(7)
    model = DistributedDataParallel(Net(), bucket_cap_mb=bucket_cap_mb, find_unused_parameters=unused, **ddp)
    if state is not None:
        model.register_comm_hook(state, hook)
    return model


def batch(rank, step, rows=16):
    g = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(rows, WIDTH, generator=g)
    return x, x[:, :7].relu()


def loss_of(model, rank, step, **kwargs):
    x, y = batch(rank, step)
    return (model(x.to(next(model.parameters()).dtype), **kwargs) - y).square().mean()


def train(model, rank, steps, *, first=0, lr=3e-3, optimizer=None, **kwargs):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, rank, step, **kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def slice_bytes(codec, bucket, elements, ranks):
    """Returns the codec's text for a tensor's slices, one a rank and each of whole buckets and blocks of 512."""
    unit = max(512, bucket)
    length = -(-elements // (unit * ranks)) * unit
    counts = [max(0, min(length, elements - rank * length)) for rank in range(ranks)]
    return sum(codec.encoded_bytes(count) for count in counts)


def weights(model):
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def tensors(state, kind):
    """{parameter: tensor} of a state's residuals or factors."""
    names = {k: v.clone() for k, v in state.state_dict().items() if k.endswith(f".{kind}")}
    return {k.removesuffix(f".{kind}").partition(".")[2] if kind == "residual" else k: v for k, v in names.items()}


class Ledger:
    """A hook that notes every rank's own gradients before it hands them on: what is owed to the model."""

    def __init__(self, state, names):
        self.state, self.names = state, names  # {id of parameter: name}
        self.owed, self.seen = {}, []

    def __call__(self, bucket):
        pairs = [(self.names[id(p)], g) for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)]
        self.seen.append([name for name, _ in pairs])
        for name, gradient in pairs:
            self.owed[name] = self.owed.get(name, 0) + gradient.double()
        return lc.ddp.hook(self.state, bucket)


def noting(ledger, bucket):
    return ledger(bucket)


def with_ledger(state, **kwargs):
    """A model whose hook keeps a ledger: (model, ledger)."""
    ledger = Ledger(state, {})
    model = make(ledger, hook=noting, **kwargs)
    ledger.names |= {id(p): name for name, p in model.module.named_parameters()}
    return model, ledger


def expect_nothing_lost(state, backward, steps, rounding, **made):
    """Steps of `backward(model, step)`: what was applied and what residuals hold is what the ranks' gradients were in sum.

    Args:
        rounding: of a step, relative to the largest gradient.
        made: as `make` takes it.

    Returns:
        The parameters of each call of the hook, by name.
    """
    model, ledger = with_ledger(state, **made)
    applied = {}
    for step in range(steps):
        backward(model, step)
        for name, p in model.module.named_parameters():
            if p.grad is not None:
                applied[name] = applied.get(name, 0) + p.grad.double()
        model.zero_grad()
    keys = {str(i): name for i, name in enumerate(n for names in ledger.seen for n in names)}
    residuals = {keys[key]: value for key, value in tensors(state, "residual").items()}
    ranks_have = [None] * dist.get_world_size()
    dist.all_gather_object(ranks_have, (ledger.owed, applied, residuals))
    for name, value in applied.items():
        assert all(torch.equal(value, other[name]) for _, other, _ in ranks_have), f"ranks differ in {name}"
        owed = sum(owed[name] for owed, *_ in ranks_have)
        held = sum(residuals.get(name, torch.zeros(())).double() for *_, residuals in ranks_have)
        largest = max(owed.abs().max().item(), 1e-6)
        sums = len(ranks_have) * value + held
        torch.testing.assert_close(sums, owed, rtol=0, atol=largest * steps * rounding)
        if name in CODED:
            assert held.abs().max() > largest * 1e-3, "a residual holds what coding lost"
        else:
            assert not held.any()
    return ledger.seen


def expect_the_same_bits(on_a_form):
    """`on_a_form(Rank, scalar)` gives (kernels, weights): with rank 0 on the barest CPU's loops as with all on this one's."""
    mixed, alike = ranks.run_ranks(on_a_form, 2, True), ranks.run_ranks(on_a_form, 2, False)
    assert mixed[0][0] == "scalar"
    for _, found in (*mixed, *alike):
        assert all(torch.equal(w, found[name]) for name, w in alike[0][1].items())
