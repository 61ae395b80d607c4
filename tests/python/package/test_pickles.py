"""Pickle and deepcopy of every public object: a copy that does as its original, or a TypeError with what to do instead."""

import copy
import pickle
from datetime import timedelta

import pytest
import torch
from torch import nn

import torch_lowcomm as lc

WAYS = {"pickle": lambda value: pickle.loads(pickle.dumps(value)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", WAYS)
def test_codecs_options_and_residuals_are_copied(way):
    codec = WAYS[way](lc.codec("gauss4"))
    x = torch.randn(512, generator=torch.Generator().manual_seed(0))
    assert torch.equal(codec.encode(x), lc.codec("gauss4").encode(x))
    options = lc.Options(policy="all_gather=minmax8", timeout=timedelta(seconds=7), encode_on_device=True)
    made = WAYS[way](options)
    names = [name for name in dir(lc.Options) if not name.startswith("_") and name != "backend"]
    assert "connections" in names
    assert [getattr(made, name) for name in names] == [getattr(options, name) for name in names]
    residual = lc.Residual(torch.zeros(2, 3))
    residual.load_state_dict({"value": torch.arange(6.0).view(2, 3)})
    assert torch.equal(WAYS[way](residual).value, residual.value)


def _diloco():
    model = nn.Linear(4, 4)
    return lc.DiLoCoX(torch.optim.SGD(model.parameters(), lr=0.1), 2, model=model)


SAVED, REMADE = "save its state_dict\\(\\) and load that into a new one", "make a new one"
NOT_COPIED = {
    "DiLoCoX": (_diloco, SAVED),
    "QuantizedAdam": (lambda: lc.QuantizedAdam(nn.Linear(4, 4).parameters()), SAVED),
    "SeedReplay": (lambda: lc.SeedReplay(nn.Linear(4, 4), lr=1e-2), SAVED),
    "SubspaceAdamW": (lambda: lc.SubspaceAdamW(nn.Linear(4, 4)), SAVED),
    "Cache": (lc.pipeline.Cache, SAVED),
    "Stage": (lambda: lc.pipeline.Stage(nn.Linear(4, 4), 0, 1, torch.device("cpu")), REMADE),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NOT_COPIED)
def test_what_belongs_to_a_process_is_refused_with_the_remedy(group, name, way):
    make, remedy = NOT_COPIED[name]
    with pytest.raises(TypeError, match=f"^{name}: pickle and deepcopy cannot copy it, .*: {remedy}"):
        WAYS[way](make())
