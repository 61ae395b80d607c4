"""lc.ddp over hosts of several ranks: exact inside a host, one coded copy a host between them, each rank a share of it."""

import copy
import os

import ddp_model
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import torch_lowcomm as lc

CODEC = "sym4:bucket=128"
WAYS = [{"codec": CODEC}, {"codec": CODEC, "rank": 4, "projection_codec": "sym8:bucket=128"}, {"codec": "qsgd8"}]
HOSTS = [[2, 0], [1, 3]]


def made(hosts=HOSTS, **options):
    """A DDP model whose hook notes each rank's own gradients, under the parameters' names: (model, ledger)."""
    torch.manual_seed(7)
    net = ddp_model.Net()
    given = DeviceMesh("cpu", hosts) if isinstance(hosts, list) else hosts
    state = lc.ddp.State(model=net, hosts=given, **options)
    ledger = ddp_model.Ledger(state, {id(p): name for name, p in net.named_parameters()})
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    model.register_comm_hook(ledger, ddp_model.noting)
    return model, ledger


def held(state, sizes):
    """What this rank's residuals hold, at the places of the elements: {parameter: float64 [elements]}."""
    found = {}
    for entry in state._connected.parameters:
        if entry.compression is not None:
            begin, end = entry.parts[state._connected.way.levels.place]
            found[entry.key] = torch.zeros(sizes[entry.key], dtype=torch.float64)
            found[entry.key][begin:end] = entry.compression.residual.flatten()
    return found


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.on("quad")
def test_nothing_is_lost(r, options):
    """Over hosts and steps the sum of the hosts' means is that of what was applied and of what the ranks' shares hold."""
    r.init()
    model, ledger = made(**options)
    applied, steps = {}, 4
    for step in range(steps):
        ddp_model.loss_of(model, r.rank, step, spare=True).backward()
        for name, p in model.module.named_parameters():
            applied[name] = applied.get(name, 0) + p.grad.double()
        model.zero_grad()
    sizes = {name: p.numel() for name, p in model.module.named_parameters()}
    everyones = [None] * r.size
    dist.all_gather_object(everyones, (ledger.owed, applied, held(ledger.state, sizes)))
    shared = 0
    for name, value in applied.items():
        assert all(torch.equal(value, other[name]) for _, other, _ in everyones), name
        owed = sum(owed[name] for owed, *_ in everyones).flatten() / len(HOSTS[0])
        shares = [residuals[name] for *_, residuals in everyones if name in residuals]
        assert bool(shares) == (name in ddp_model.CODED)
        shared += len(shares) == r.size
        largest, kept = owed.abs().max().item(), sum(shares)
        assert not shares or kept.abs().max() > largest * 1e-3
        sums = len(HOSTS) * value.flatten() + kept
        torch.testing.assert_close(sums, owed, rtol=0, atol=largest * steps * 2**-18)
    assert shared == (0 if "rank" in options else 3), (
        "every rank has a part of each matrix, or all of a matrix with factors"
    )


@pytest.mark.on("quad")
def test_what_is_exact_is_the_mean(r):
    """Norms and biases in every step, all gradients in warm-up steps, inside exact(), and sparse ones."""
    r.init()
    plain = ddp_model.make()
    model, _ = made(codec=CODEC, warm_up_steps=1)
    for step in range(3):
        with lc.exact() if step == 2 else torch.enable_grad():
            for each in (plain, model):
                ddp_model.loss_of(each, r.rank, step, spare=True).backward()
        for (name, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            if step != 1 or name not in ddp_model.CODED:
                torch.testing.assert_close(p.grad, q.grad)
            else:
                assert 1e-3 < (p.grad - q.grad).norm() / q.grad.norm() < 0.3
        plain.zero_grad(), model.zero_grad()
    words = torch.nn.Embedding(64, 32, sparse=True)
    bags = DistributedDataParallel(words)
    bags.register_comm_hook(lc.ddp.State(hosts=DeviceMesh("cpu", HOSTS)), lc.ddp.hook)
    bags(torch.tensor([r.rank, 7])).sum().backward()
    expected = torch.zeros(64, 32)
    expected[[0, 1, 2, 3, 7]] = torch.tensor([0.25, 0.25, 0.25, 0.25, 1.0]).unsqueeze(1)
    torch.testing.assert_close(words.weight.grad.to_dense(), expected)


@pytest.mark.parametrize(("ranks", "options"), [(2, WAYS[0]), (4, WAYS[0]), (2, WAYS[1] | {"rank": 32})], ids=str)
def test_a_hosts_link_carries_what_one_ranks_does(ranks, options):
    """Bytes of all ranks of a host between hosts, next to those of one rank without others on its host."""
    from ranks import run_ranks

    flat = run_ranks(_bytes_sent, 2, "flat", options)
    hosts = run_ranks(_bytes_sent, 2 * ranks, [list(range(ranks)), list(range(ranks, 2 * ranks))], options)
    assert sum(hosts[:ranks]) == pytest.approx(flat[0], rel=0.01)
    assert "rank" in options or max(hosts) <= 1.05 * min(hosts), "equal shares"


def _bytes_sent(r, hosts, options):
    r.init()
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    given = DeviceMesh("cpu", hosts) if isinstance(hosts, list) else hosts
    state = lc.ddp.State(model=net, hosts=given, **options)
    model = DistributedDataParallel(net)
    model.register_comm_hook(state, lc.ddp.hook)
    lc.reset_stats()
    model(torch.ones(2, 512)).square().mean().backward()
    return lc.stats(state._connected.way.coding)[state._connected.way.coding.group_name]["all_reduce"]["wire_bytes"]


@pytest.mark.parametrize("options", WAYS[:2], ids=str)
@pytest.mark.on("quad")
def test_a_resumed_run_goes_on_with_the_same_bits(r, options):
    r.init()
    model, ledger = made(**options)
    ddp_model.train(model, r.rank, 2, spare=True)
    kept, weights = ledger.state.state_dict(), {n: t.clone() for n, t in model.module.state_dict().items()}
    kept = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in kept.items()}
    ddp_model.loss_of(model, r.rank, 9, spare=True).backward()
    other, again = made(**options)
    other.module.load_state_dict(weights)
    again.state.load_state_dict(kept)
    ddp_model.loss_of(other, r.rank, 9, spare=True).backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    again.state.load_state_dict(kept)
    copied = copy.deepcopy(again.state)
    assert all(torch.equal(t, kept[name]) for name, t in copied.state_dict().items() if isinstance(t, torch.Tensor))
    copied = copy.deepcopy(again.state)
    copied._hosts = "flat"
    with pytest.raises(ValueError, match="expected a copy from the same hosts, flat, got one from"):
        copied.state_dict()
    _, flat = made("flat", **options)
    with pytest.raises(ValueError, match=r"hosts: expected flat, got \[\[0, 2\], \[1, 3\]\]"):
        flat.state.load_state_dict(kept)


@pytest.mark.on("quad")
def test_a_nan_of_one_rank_reaches_all_and_changes_no_state(r):
    r.init()
    model, ledger = made(codec=CODEC)
    ddp_model.train(model, r.rank, 1, spare=True)
    before = {name: t.clone() for name, t in ddp_model.tensors(ledger.state, "residual").items()}
    loss = ddp_model.loss_of(model, r.rank, 1, spare=True)
    (loss * (float("nan") if r.rank == 2 else 1)).backward()
    assert all(p.grad.isnan().any() for p in model.parameters() if p.ndim == 2)
    after = ddp_model.tensors(ledger.state, "residual")
    assert before and all(torch.equal(t, after[name]) for name, t in before.items())


@pytest.mark.on(4, timeout=60, allow_exit={3: 7})
def test_a_rank_that_dies_is_an_error_on_every_other(r):
    r.init()
    model, ledger = made(codec=CODEC)
    ddp_model.train(model, r.rank, 1, spare=True)
    before = {name: t.clone() for name, t in ddp_model.tensors(ledger.state, "residual").items()}
    dist.barrier()
    if r.rank == 3:
        os._exit(7)
    with pytest.raises(dist.DistBackendError):
        ddp_model.loss_of(model, r.rank, 1, spare=True).backward()
    after = ddp_model.tensors(ledger.state, "residual")
    assert all(torch.equal(t, after[name]) for name, t in before.items())


@pytest.mark.on("quad")
def test_mistakes(r):
    r.init()
    for error, words, hosts in (
        (TypeError, "hosts: expected 'auto', 'flat' or a DeviceMesh, got int", 2),
        (ValueError, "hosts: expected 'auto', 'flat' or a DeviceMesh, got 'racks'", "racks"),
        (ValueError, r"expected a mesh \[hosts, ranks of a host\], got 1 dimensions", [0, 1, 2, 3]),
        (ValueError, r"hosts: expected 2 hosts or more.*got \[\[0, 1, 2, 3\]\]", [[0, 1, 2, 3]]),
    ):
        with pytest.raises(error, match=words):
            made(hosts)
    mesh = DeviceMesh("cpu", HOSTS)
    with pytest.raises(dist.DistBackendError, match=r"hosts differs.*flat"):
        made("flat" if r.rank == 1 else mesh)
