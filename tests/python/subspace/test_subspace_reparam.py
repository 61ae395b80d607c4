"""lc.subspace.reparam: coordinates as parameters."""

import copy

import pytest
import subspace_adam_model as small
import subspace_case as case
import torch
from diloco_model import differing
from subspace_adam_model import backward, fresh

import torch_lowcomm as lc
from torch_lowcomm.subspace.weights import constrained_weights, distances


def _values(model):
    """Every weight as the forward pass has it."""
    return {
        f"{path}.{name}": getattr(module, name).detach().clone()
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | small.Embedding)
        for name in ("weight", "bias")
        if getattr(module, name, None) is not None
    }


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_of_coordinates_is_sgd_of_projected_gradients(momentum):
    """In float64, < 1e-9 after 60 steps: the weights, the losses, and the constrained weights' place in S."""
    models = fresh(), lc.subspace.reparam(fresh())
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.3 * (1 - momentum), momentum=momentum, weight_decay=1e-3) for m in models
    ]
    for step in range(60):
        losses = [backward(model, step) for model in models]
        assert abs(losses[0] - losses[1]) < 1e-12
        for model in models:  # of the second one only the biases
            small.project_gradients(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    one, other = map(_values, models)
    assert one.keys() == other.keys() and len(one) == 17
    assert max((one[name] - other[name]).abs().max().item() for name in one) < 1e-9
    assert (one["blocks.0.down.weight"] - _values(fresh())["blocks.0.down.weight"]).abs().max() > 1e-3
    assert max(distances(constrained_weights(models[0])).values()) < 1e-13


def test_coordinates_are_the_parameters():
    """k/d of the numbers; the same outputs; any optimizer trains them; the optimizer of the subspace sees plain ones."""
    before = fresh(torch.float32)
    model = lc.subspace.reparam(copy.deepcopy(before))
    named = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert named["blocks.0.down.coordinates"] == (small.RANK, small.HIDDEN)
    assert named["embedding.coordinates"] == (small.VOCABULARY, small.RANK)
    ids = torch.arange(12).view(2, 6)
    torch.testing.assert_close(model(ids), before(ids))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizers = [
        torch.optim.Muon(matrices, lr=1e-2),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=1e-2),
    ]
    losses = []
    for step in range(60):
        losses.append(backward(model, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])
    values = _values(model)
    for name in ("blocks.0.down.weight", "blocks.1.out.weight"):
        off = values[name] - small.projected(values[name], small.vectors(), False)
        assert off.norm() < 1e-6 * values[name].norm()
    assert isinstance(model.blocks[0].down, torch.torch.nn.Linear) and isinstance(model.embedding, small.Embedding)


@pytest.mark.parametrize("variant", ["rows", "project_all"])
def test_the_subspace_optimizer_trains_both_alike(variant):
    """Weights and coordinates, with clipping, in float64 < 1e-9 after 50 steps."""
    models = fresh(), lc.subspace.reparam(fresh())
    optimizers = [lc.SubspaceAdamW(m, lr=1e-2, weight_decay=0.1, variant=variant) for m in models]
    for step in range(50):
        losses = [backward(model, step) for model in models]
        assert abs(losses[0] - losses[1]) < 1e-12
        norms = [optimizer.clip_grad_norm(0.1).item() for optimizer in optimizers]
        assert abs(norms[0] - norms[1]) < 1e-12
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    one, other = map(_values, models)
    assert max((one[name] - other[name]).abs().max().item() for name in one) < 1e-9
    assert set(optimizers[1].distances()) == {"blocks.0.down.bias", "blocks.1.down.bias"}
    again = lc.subspace.reparam(fresh(seed=8))
    resumed = lc.SubspaceAdamW(again, variant=variant)
    again.load_state_dict(models[1].state_dict())
    resumed.load_state_dict(optimizers[1].state_dict())
    for model, optimizer in ((models[1], optimizers[1]), (again, resumed)):
        small.train(model, optimizer, range(50, 54), clip=0.1)
    assert not differing(_values(models[1]), _values(again))


def test_a_constrained_decoder_and_its_stages():
    """The same outputs in one piece and in two stages; nothing that breaks exactness; k numbers a row are what is trained."""
    model, other = case.constrained(), lc.subspace.reparam(case.constrained())
    x = case.ids()
    assert case.apart(other(x, x), model(x, x)) < 1e-13
    assert case.apart(case.chain(case.cuts(other, 2), x), case.chain(case.cuts(model, 2), x)) < 1e-12
    assert lc.subspace.check(other) == []
    for net in (model, other):
        stage = lc.subspace.cut(net, 1, 2)
        optimizer = lc.SubspaceAdamW(stage, lr=1e-2)
        net(x, x).backward()
        optimizer.clip_grad_norm(0.1)
        optimizer.step()
        net.zero_grad()
    assert case.apart(other(x, x), model(x, x)) < 1e-12 and case.apart(model(x, x), case.constrained()(x, x)) > 1e-4


@pytest.mark.parametrize("change", [lambda model: model, lc.subspace.reparam], ids=["weights", "coordinates"])
def test_a_module_is_pickled_and_copied_whole(change, tmp_path):
    model, ids = change(case.constrained()), case.ids()
    torch.save(model, tmp_path / "model")
    loaded = torch.load(tmp_path / "model", weights_only=False)
    for make in (lambda: loaded, lambda: copy.deepcopy(model)):
        other = make()
        assert isinstance(other.blocks[0].down, torch.nn.Linear) and repr(other) == repr(model)
        assert other.blocks[0].down.subspace_basis is other.subspace_basis is not model.subspace_basis
        assert lc.subspace.check(other) == [] and torch.equal(other(ids, ids), model(ids, ids))
        for decoder in (other, model):
            optimizer = lc.SubspaceAdamW(decoder, lr=1e-2)
            decoder(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(other(ids, ids), model(ids, ids))


def test_mistakes():
    with pytest.raises(ValueError, match="expected a module with constrained weights"):
        lc.subspace.reparam(torch.nn.Linear(3, 3))
    model = lc.subspace.reparam(fresh())
    with pytest.raises(ValueError, match="expected a module with constrained weights"):
        lc.subspace.reparam(model)
