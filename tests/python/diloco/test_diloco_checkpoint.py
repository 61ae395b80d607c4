"""lc.DiLoCoX saved while averages are under way, and resumed: to the bit."""

import diloco_model
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

SAVED, STEPS = 22, 29  # saved in the middle of an interval whose message is under way
CASES = {
    "coded": {"codec": "sym4:bucket=64"},
    "exact": {"codec": None, "sync_warmup": 1},
    "low rank": {"codec": "sym4:bucket=64", "rank": 6, "adapt_rank": True},
    "adaptive": {"codec": "sym8:bucket=64", "rank": 6, "adapt_sync_every": True},
    "8-bit residuals": {"codec": "sym4:bucket=64", "rank": 3, "residual_dtype": "int8"},
    "stochastic": {"codec": "qsgd4:bucket=64"},
    "sync": {"codec": "sym4:bucket=64", "rank": 4, "mode": "sync"},
    "fragments": {
        "codec": "sym4:bucket=64",
        "mode": "restart",
        "fragments": 3,
        "fragment_sync_delay": 2,
        "fragment_update_alpha": 0.25,
    },
    "buffers": {"average_buffers": True},
}


def _paths(nest, path=""):
    items = nest.items() if isinstance(nest, dict) else enumerate(nest) if isinstance(nest, list | tuple) else ()
    return [path, *(p for key, value in items for p in _paths(value, f"{path}.{key}"))]


def _save(r, model, optimizer, how):
    """Each rank's own tensors are under the rank's own name."""
    own = f"model{r.rank}"
    if how == "save":
        torch.save({"loop": optimizer.state_dict(), own: model.state_dict()}, r.path(f"rank{r.rank}.pt"))
    elif how == "dcp":
        dcp.save({"loop": optimizer, own: model.state_dict()}, checkpoint_id=r.path("dcp"))
    else:
        weights, loop = get_state_dict(model, optimizer)
        dcp.save({"loop": loop, own: weights}, checkpoint_id=r.path("dcp"))


def _load(r, model, optimizer, how):
    own = f"model{r.rank}"
    if how == "save":
        saved = torch.load(r.path(f"rank{r.rank}.pt"))
        model.load_state_dict(saved[own])
        optimizer.load_state_dict(saved["loop"])
    elif how == "dcp":
        saved = {own: model.state_dict()}
        dcp.load({"loop": optimizer, **saved}, checkpoint_id=r.path("dcp"))
        model.load_state_dict(saved[own])
    else:
        weights, loop = get_state_dict(model, optimizer)
        saved = {"loop": loop, own: weights}
        dcp.load(saved, checkpoint_id=r.path("dcp"))
        set_state_dict(model, optimizer, model_state_dict=saved[own], optim_state_dict=saved["loop"])


WAYS = [
    *(pytest.param(case, "save", marks=pytest.mark.later) for case in CASES),
    *((case, "dcp") for case in ("low rank", "8-bit residuals", "fragments", "buffers")),
    *((case, "functions") for case in ("low rank", "adaptive", "fragments", "buffers")),  # torch's, around dcp
]


@pytest.mark.parametrize(("case", "how"), WAYS)
@pytest.mark.on("pair", group={})
def test_a_resumed_run_is_the_uninterrupted_one(r, case, how):
    """A run that is never saved, and one that is saved, ended and made again from its files."""
    options = CASES[case]
    model, optimizer = diloco_model.fresh(**options)
    diloco_model.train(model, optimizer, r.rank, range(STEPS))
    whole = diloco_model.ended(model, optimizer)
    dist.destroy_process_group()

    r.init()
    model, optimizer = diloco_model.fresh(**options)
    diloco_model.train(model, optimizer, r.rank, range(SAVED))
    _save(r, model, optimizer, how)
    dist.destroy_process_group()

    r.init()
    model, optimizer = diloco_model.fresh(**options)
    _load(r, model, optimizer, how)
    diloco_model.train(model, optimizer, r.rank, range(SAVED, STEPS))
    resumed = diloco_model.ended(model, optimizer)
    assert not diloco_model.differing(resumed, whole)
    assert any(name.endswith("exp_avg_sq") for name in _paths(resumed)) and any("message" in n for n in _paths(resumed))
    if "adapt_rank" in options or "adapt_sync_every" in options:
        assert optimizer.report["rank"] < options["rank"], "it had adapted"
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.inner.param_groups[0]["lr"] == 0.5, "schedulers still move the inner rate"


@pytest.mark.on("pair", group={})
def test_forms_that_torch_gives_a_state(r):
    """Torch's functions pass the state on by their options; forms that it does not survive are refused."""
    model, optimizer = diloco_model.fresh()
    diloco_model.train(model, optimizer, r.rank, range(SAVED))
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    diloco_model.train(model, optimizer, r.rank, range(SAVED, STEPS))
    set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(full_state_dict=True))
    assert not diloco_model.differing(optimizer.state_dict(), whole)
    with pytest.raises(RuntimeError, match="optim state_dict is empty"):
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    model, optimizer = diloco_model.fresh()
    theirs = whole if r.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if r.rank == 0:
        set_optimizer_state_dict(model, optimizer, theirs, options=options)
        return
    said = f"expected 'rank1' of inner step {SAVED}, as 'outer0', got one of 0: each rank loads its own"
    with pytest.raises(ValueError, match=said):
        set_optimizer_state_dict(model, optimizer, theirs, options=options)


@pytest.mark.on("pair", group={})
def test_options_are_those_of_the_resumed_run(r):
    model, optimizer = diloco_model.fresh()
    diloco_model.train(model, optimizer, r.rank, range(SAVED))
    saved = optimizer.state_dict()
    model, optimizer = diloco_model.fresh(every=6, error_feedback=0.5)
    optimizer.load_state_dict(saved)
    begun = []
    for step in range(SAVED, SAVED + 16):
        diloco_model.train(model, optimizer, r.rank, range(step, step + 1))
        begun.append(optimizer.report["outer_steps"])
    # A message under way is applied when it was due; from then on it is as the options say.
    assert optimizer.report["sync_every"] == 6
    assert [SAVED + 1 + i for i in range(1, 16) if begun[i] > begun[i - 1]] == [24, 30, 36]
