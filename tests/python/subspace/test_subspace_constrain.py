"""lc.subspace.constrain as a transaction, and the options of the embedding that it replaces."""

import sys

import pytest
import subspace_case as case
import torch
from torch import nn

import torch_lowcomm as lc


def _kept(model):
    """All that constrain may change of a decoder."""
    attributes = {name: sorted(set(vars(module)) - {"training"}) for name, module in model.named_modules()}
    parameters = {
        name: (id(p), p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)
    }
    return attributes, parameters, list(model.state_dict()), [id(module) for module in model.modules()]


def _expect_equal(model, kept):
    for mine, before in zip(_kept(model), kept, strict=True):
        if isinstance(mine, dict) and "embed.weight" in mine:
            assert mine.keys() == before.keys()
            for name, (which, where, value) in mine.items():
                assert (which, where) == before[name][:2], name
                torch.testing.assert_close(value, before[name][2], rtol=0, atol=0, equal_nan=True)
        else:
            assert mine == before


def _not_a_number(model):
    with torch.no_grad():
        model.embed.weight[100, 0] = float("nan")  # not among the tokens of probes: only the last check sees it
    return r"embed\.weight: a share nan of its norm is outside the subspace"


def _tied(model):
    model.head.weight = model.embed.weight
    return _not_a_number(model)


def _with_bias(model):
    model.blocks[3].down.bias = nn.Parameter(torch.ones(case.WIDTH, dtype=torch.float64), requires_grad=False)
    return _not_a_number(model)


@pytest.mark.parametrize("spoil", [_not_a_number, _tied, _with_bias])
def test_a_decoder_that_is_refused_at_the_end_is_as_it_was(spoil):
    model = case.gpt()
    message = spoil(model)
    before = _kept(model)
    with pytest.raises(ValueError, match=message):
        lc.subspace.constrain(model, case.RANK, sigma=0.1)
    _expect_equal(model, before)
    with torch.no_grad():
        model.embed.weight[100, 0] = 0.0
    assert lc.subspace.check(lc.subspace.constrain(model, case.RANK)) == []


def test_a_mistake_on_the_way_changes_nothing(monkeypatch):
    model = case.gpt()
    before = _kept(model)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["torch_lowcomm.subspace.constrain"], "Report", stop)
    with pytest.raises(KeyboardInterrupt):
        lc.subspace.constrain(model, case.RANK)
    _expect_equal(model, before)


def test_the_config_of_a_model_that_is_refused():
    pytest.importorskip("transformers", reason="no package transformers")
    model = case.family("Llama", tie_word_embeddings=True)
    with torch.no_grad():
        model.model.embed_tokens.weight[90, 0] = float("nan")
    with pytest.raises(ValueError, match="model.embed_tokens.weight: a share nan"):
        lc.subspace.constrain(model, case.RANK, sigma=0.1)
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight


def test_a_block_that_returns_nan_is_named():
    model = case.gpt()
    with torch.no_grad():
        model.blocks[1].up.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.1: returns NaN or infinity for made-up tokens"):
        lc.subspace.constrain(model, case.RANK)


OPTIONS = {"max_norm": 1.0, "scale_grad_by_freq": True, "sparse": True}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_an_embedding_that_are_refused(option):
    model = case.gpt()
    model.embed = nn.Embedding(*model.embed.weight.shape, dtype=torch.float64, **{option: OPTIONS[option]})
    with pytest.raises(ValueError, match=rf"embed\.{option}: is {OPTIONS[option]}: "):
        lc.subspace.constrain(model, case.RANK)


@pytest.mark.parametrize("change", [lambda model: model, lc.subspace.reparam], ids=["weights", "coordinates"])
def test_padding_is_not_trained(change):
    """The padding token's row of T_S stays as it is, in one process and in stages; it has its fixed part."""
    padding, ids = 7, case.ids()
    ids[:, -3:] = padding
    model = case.gpt()
    model.embed = nn.Embedding(*model.embed.weight.shape, padding_idx=padding, dtype=torch.float64)
    model = change(lc.subspace.constrain(model, case.RANK))
    assert not model.embed.weight[padding].any()
    assert torch.equal(
        model.embed(torch.tensor([[padding]]))[0, 0], model.embed.anchor(torch.tensor([padding]), torch.float64)[0]
    )
    stages = case.cuts(model, 2)
    optimizer = lc.SubspaceAdamW(model, lr=0.1)
    before = model.embed.weight.detach().clone()
    case.chain(stages, ids).square().mean().backward()
    optimizer.step()
    after = model.embed.weight
    assert torch.equal(after[padding], before[padding])
    assert not torch.equal(after[ids[0, 0]], before[ids[0, 0]])
