"""Errors of lc.ddp about a caller's mistakes, about ranks that differ, and when a backward breaks off."""

import os
import signal

import ddp_model
import pytest
import torch
import torch.distributed as dist

import torch_lowcomm as lc
from torch_lowcomm.groups import backend_of


def _all(name, parameter):
    return True


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"codec": "nope4"}, ValueError, ["nope4"]),
        ({"codec": "none"}, ValueError, [" codec: expected a lossy codec", "register no hook", "'none'"]),
        ({"codec": "sym4:axis=channel"}, ValueError, ["flat tensor", "axis=channel"]),
        ({"codec": "levels4"}, ValueError, ["one of flat tensors, not levels", "got 'levels4"]),
        ({"codec": "log9"}, ValueError, ["one of flat tensors, not levels", "got 'log9'"]),
        ({"rank": 0}, ValueError, ["rank: expected 1 or more", "got 0"]),
        ({"rank": 4, "projection_codec": "none"}, ValueError, ["projection_codec: expected a lossy codec", "none"]),
        ({"projection_codec": "sym8"}, ValueError, ["projection_codec: expected rank= too"]),
        ({"rank": 2.5}, ValueError, ["rank: expected 1 or more", "got 2.5"]),
        ({"warm_up_steps": -1}, ValueError, ["warm_up_steps: expected 0 or more", "got -1"]),
        ({"residual_dtype": "int4"}, ValueError, ["residual_dtype", "float32", "int4"]),
        ({"exact": _all}, ValueError, ["exact: expected model= too", "got none"]),
        ({"exact": ["up.weight"]}, TypeError, ["a function of (name, parameter)", "list"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_will_not_do(r, options, error, said):
    r.init()
    with pytest.raises(error) as caught:
        lc.ddp.State(**options)
    model = ddp_model.make(lc.ddp.State())  # the group goes on
    ddp_model.loss_of(model, r.rank, 0, spare=True).backward()
    text = str(caught.value)
    assert all(part in text for part in said), text


@pytest.mark.later
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([{"codec": "sym4"}, {"codec": "sym8"}], ["codec", "sym4", "sym8"]),
        ([{"rank": 4}, {"rank": 4, "projection_codec": "sym8"}], ["projection_codec", "sym4", "sym8"]),
        ([{}, {"warm_up_steps": 7}], ["warm_up_steps", "0", "7"]),
    ],
    ids=str,
)
@pytest.mark.on(2)
def test_ranks_that_differ_are_told(r, options, said):
    r.init()
    with pytest.raises(dist.DistBackendError) as caught:
        lc.ddp.State(**options[r.rank])
    text = str(caught.value)
    assert all(part in text for part in said), text


def test_ranks_that_code_other_parameters_are_told(r):
    """As many as elsewhere, but other ones."""
    r.init()
    model, kept = ddp_model.Net(), ("up.weight", "down.weight")[r.rank]
    with pytest.raises(dist.DistBackendError) as caught:
        lc.ddp.State(model=model, exact=lambda name, _: name == kept)
    text = str(caught.value)
    assert "coded parameters" in text and "hash" in text, text


@pytest.mark.on(2)
def test_one_ranks_mistake_reaches_the_others(r):
    r.init()
    with pytest.raises(ValueError if r.rank == 1 else dist.DistBackendError) as caught:
        lc.ddp.State(rank=0 if r.rank == 1 else 4)
    text = str(caught.value)
    assert "rank: expected 1 or more" in text


def test_a_group_of_gloo_is_refused(r):
    r.init("gloo")
    with pytest.raises(ValueError, match="expected a group of backend lowcomm"):
        lc.ddp.State()


def test_a_state_of_another_model_is_refused(r):
    r.init()
    state = lc.ddp.State(model=ddp_model.Net())
    model = ddp_model.make(state)  # of parameters of its own
    with pytest.raises(ValueError, match="expected a parameter of the state's model"):
        ddp_model.loss_of(model, r.rank, 0, spare=True).backward()
    other = ddp_model.make(object())
    with pytest.raises(TypeError, match=r"expected a torch_lowcomm.ddp.State, got object"):
        ddp_model.loss_of(other, r.rank, 0, spare=True).backward()


def test_the_op_checks_before_it_sends(r):
    r.init()
    lc.ddp.State(rank=4)
    with pytest.raises(ValueError, match="lowcomm: compression: expected a tensor of 4 elements, got 3"):
        compression = torch_compression([4])
        backend_of().all_reduce_low_rank(
            [torch.ones(3)],
            dist.ReduceOp(dist.ReduceOp.AVG),
            "sym4:nonfinite=poison",
            "sym4:nonfinite=poison",
            [compression],
            slots=[0],
            owners=[0],
            step=0,
        )
    x = torch.ones(4)
    for change, error, said in [
        ({"tensors": [x, x]}, ValueError, "a state a tensor, got 1 for 2"),
        ({"tensors": [x.double()]}, TypeError, "expected float32, float16 or bfloat16, got Double"),
        ({"op": dist.ReduceOp(dist.ReduceOp.MAX)}, ValueError, "expected SUM or AVG"),
        ({"codec": "sym4"}, ValueError, "nonfinite=poison, got sym4"),
        ({"projection": "sym8"}, ValueError, "nonfinite=poison, got sym8"),
        ({"slots": []}, ValueError, "a slot and an owner a tensor, got 0 and 1 for 1"),
        ({"tensors": [torch.ones(2, 4)[:, ::2]]}, ValueError, "dense contiguous"),
    ]:
        arguments = {"tensors": [x], "op": dist.ReduceOp(dist.ReduceOp.AVG), "codec": "sym4:nonfinite=poison"}
        arguments |= {
            "projection": "sym4:nonfinite=poison",
            "states": [compression],
            "slots": [0],
            "owners": [0],
            "step": 0,
        } | change
        with pytest.raises(error, match=said):
            backend_of().all_reduce_low_rank(**arguments)


def torch_compression(shape):
    return lc._C.Compression(shape, rank=0, feedback=True, eight_bits=False, seed=0)


def test_a_compression_is_a_transaction():
    with pytest.raises(ValueError, match="factors are smaller than the matrix of 8 x 8, got 4"):
        lc._C.Compression([8, 8], rank=4, feedback=True, eight_bits=False, seed=0)
    compression = torch_compression([3, 5])
    with pytest.raises(ValueError, match="commit: expected an op that has ended well"):
        compression.commit()
    with pytest.raises(ValueError, match=r"expected Float of shape \[3, 5\], got Float of shape \[5, 3\]"):
        compression.set(torch.ones(5, 3), None)
    with pytest.raises(ValueError, match="expected a residual and no factor, got no residual and a factor"):
        compression.set(None, torch.ones(3, 5))
    compression.set(torch.arange(15.0).view(3, 5), None)
    compression.scale(0.5)
    assert torch.equal(compression.residual, torch.arange(15.0).view(3, 5) / 2)


@pytest.mark.on(2, allow_exit={1: -signal.SIGKILL})
def test_a_rank_that_dies_leaves_residuals_as_they_were(r):
    """Rank 1 dies in the second bucket's hook of step 2."""
    r.init(timeout_s=10)
    state = lc.ddp.State(codec="sym4", rank=4)
    model = ddp_model.make(_Dying(state, r.rank), hook=_dying)
    for step in range(2):
        ddp_model.loss_of(model, r.rank, step, spare=True).backward()
    before = {k: v.clone() for k, v in state.state_dict().items() if isinstance(v, torch.Tensor)}
    with pytest.raises(RuntimeError, match="lowcomm"):
        ddp_model.loss_of(model, r.rank, 2, spare=True).backward()
    after = state.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items()), "nothing of a step that failed is kept"
    dist.destroy_process_group()


class _Dying:
    def __init__(self, state, rank):
        self.state, self.rank = state, rank


def _dying(dying, bucket):
    if dying.rank == 1 and dying.state.steps == 3 and bucket.index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return lc.ddp.hook(dying.state, bucket)
