"""Errors of lc.DiLoCoX about a caller's mistakes: the name, what it expects and what it got, and nothing is sent before."""

import ddp_model
import diloco_model
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_lowcomm as lc

FACTORS = {"rank": 4}
ADAPTIVE = {"rank": 4, "adapt_rank": True, "adapt_sync_every": True}
NAN, INF = float("nan"), float("inf")
OPTIONS = [
    ({"sync_every": 0}, ValueError, "sync_every: expected 1 or more.*got 0"),
    ({"sync_every": 2.5}, TypeError, "sync_every: expected an integer.*got 2.5"),
    ({"sync_every": True}, TypeError, "sync_every: expected an integer.*got True"),
    ({"mode": "later"}, ValueError, "mode: expected sync, continue or restart.*got 'later'"),
    ({"mode": None}, TypeError, "mode: expected sync, continue or restart.*got None"),
    ({"outer_lr": 0}, ValueError, "outer_lr: expected a number above 0.*got 0"),
    ({"outer_lr": NAN}, ValueError, "outer_lr: expected a number above 0.*got nan"),
    ({"outer_lr": INF}, ValueError, "outer_lr: expected a number above 0.*got inf"),
    ({"outer_lr": "0.7"}, TypeError, "outer_lr: expected a number.*got '0.7'"),
    ({"outer_momentum": 1}, ValueError, r"outer_momentum: expected a number in \[0, 1\).*got 1"),
    ({"outer_momentum": NAN}, ValueError, r"outer_momentum: expected a number in \[0, 1\).*got nan"),
    ({"sync_warmup": -1}, ValueError, "sync_warmup: expected 0 or more.*got -1"),
    ({"codec": "nope4"}, ValueError, "nope4"),
    ({"codec": 4}, TypeError, "codec: expected a codec's text.*got 4"),
    ({"codec": "sym4:axis=channel"}, ValueError, "codec: expected one of flat tensors.*axis=channel"),
    ({"codec": "levels4"}, ValueError, "codec: expected one of flat tensors without a level table.*levels4"),
    ({"codec": None, "rank": 4}, ValueError, "codec: expected one with rank.*got none"),
    ({"codec": None, "error_feedback": True}, ValueError, "codec: expected one with.*error_feedback.*got none"),
    *(({"error_feedback": e}, ValueError, rf"error_feedback: .* in \(0, 1\], got {e}") for e in (0.0, -0.5, 1.5, NAN)),
    ({"error_feedback": "0.9"}, TypeError, "error_feedback: expected a number.*got '0.9'"),
    ({"rank": 0}, ValueError, "rank: expected 1 or more, or None.*got 0"),
    ({"rank": 2.5}, TypeError, "rank: expected an integer.*got 2.5"),
    ({"projection_codec": "sym8"}, ValueError, "projection_codec: expected rank with it.*got none"),
    (FACTORS | {"projection_codec": "levels4"}, ValueError, "without a level table.*levels4"),
    ({"residual_dtype": "int4"}, ValueError, "residual_dtype: expected one of.*float32.*got 'int4'"),
    ({"residual_dtype": "int8", "codec": "gauss2"}, ValueError, "residual_dtype: expected error_feedback.*got none"),
    ({"adapt_rank": True}, ValueError, "adaptive compression: expected a rank.*got none"),
    ({"adapt_sync_every": True}, ValueError, "adaptive compression: expected a rank.*got none"),
    (FACTORS | {"min_rank": 5}, ValueError, "min_rank: expected 1...4.*got 5"),
    (FACTORS | {"min_rank": 0}, ValueError, "min_rank: expected 1...4.*got 0"),
    (FACTORS | {"min_rank": 2}, ValueError, "min_rank: expected 1 without adapt_rank and adapt_sync_every, got 2"),
    ({"fragments": 0}, ValueError, r"fragments: expected 1...4 \(sync_every\), got 0"),
    ({"fragments": 5}, ValueError, r"fragments: expected 1...4 \(sync_every\), got 5"),
    ({"sync_every": 30, "fragments": 20}, ValueError, "fragments: expected at most the number of parameters, 10.*20"),
    ({"fragment_sync_delay": 0}, ValueError, "fragment_sync_delay: expected 1 or more, or None.*got 0"),
    ({"fragment_sync_delay": 5}, ValueError, r"fragment_sync_delay: expected 1...4 \(sync_every\), got 5"),
    ({"fragment_sync_delay": 2, "mode": "sync"}, ValueError, "fragment_sync_delay: expected none with mode sync.*2"),
    (ADAPTIVE | {"fragment_sync_delay": 2}, ValueError, "fragment_sync_delay: expected none with an adaptive.*2"),
    (
        {"fragment_update_alpha": 1, "mode": "restart"},
        ValueError,
        r"fragment_update_alpha: expected a number in \[0, 1\)",
    ),
    ({"fragment_update_alpha": 0.5}, ValueError, "fragment_update_alpha: expected 0 with mode continue.*0.5"),
    ({"quorum": 0}, ValueError, "quorum: expected 1 or more, or None.*got 0"),
    ({"quorum": 2}, ValueError, "quorum: expected group= to be a Membership.*got a process group"),
    ({"quorum": 2, "grace_s": -1}, ValueError, "grace_s: expected a number of 0 or more, or None.*got -1"),
    ({"grace_s": 1}, ValueError, "grace_s: expected quorum too.*got 1"),
    ({"check_every": -1}, ValueError, "check_every: expected 0 or more.*got -1"),
    ({"seed": -1}, ValueError, "seed: expected 0 or more.*got -1"),
    ({"average_buffers": True}, ValueError, "average_buffers: expected model= too.*got none"),
]


@pytest.mark.later
@pytest.mark.on("pair", group={})
def test_options_that_will_not_do(r):
    model = ddp_model.Net()
    for options, error, said in OPTIONS:
        with pytest.raises(error, match=said):
            lc.DiLoCoX(torch.optim.SGD(model.parameters()), **{"sync_every": 4, **options})


@pytest.mark.on("pair", group={})
def test_arguments_that_will_not_do(r):
    """Arguments that are no options: (error, what it says, keywords)."""
    torch.manual_seed(7)
    model = ddp_model.Net()
    sgd = torch.optim.SGD(model.parameters())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("clusters", "stages"))
    gloo = dist.new_group([0, 1], backend="gloo")
    sharded = nn.Linear(8, 8)
    fully_shard(sharded, mesh=mesh["clusters"])
    averaged = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    integers = torch.optim.SGD([torch.zeros(3, dtype=torch.int32)])
    sparse = torch.optim.SGD([torch.zeros(3).to_sparse()])
    for error, said, optimizer, options in [
        (TypeError, "expected an optimizer, got Net", model, {}),
        (TypeError, "expected an inner optimizer, got a DiLoCoX", lc.DiLoCoX(sgd, 4), {}),
        (ValueError, r"expected an optimizer of the model's parameters, got .* of shape \(96, 48\)", sgd,
         {"model": ddp_model.Net()}),
        (TypeError, "expected a process group, or None for the default one, got str", sgd, {"group": "all"}),
        (TypeError, "mesh: expected a DeviceMesh, got tuple", sgd, {"mesh": (2, 2)}),
        (ValueError, "expected a mesh, or group= and cluster=, got both", sgd,
         {"mesh": mesh, "group": dist.group.WORLD}),
        (ValueError, "expected a group of backend lowcomm, got .* of 'gloo'", sgd, {"group": gloo}),
        (TypeError, "cluster: expected a process group, got str", sgd, {"cluster": "all"}),
        (ValueError, r"expected mesh= .* FSDP2 shards over the ranks \[0, 1\], got the group of the ranks \[0, 1\]",
         torch.optim.SGD(sharded.parameters()), {}),
        (ValueError, r"train separately .* got ranks \[[01]\], .*DDP.* leave DDP out.* process_group=",
         torch.optim.SGD(averaged.parameters()), {}),
        (ValueError, "train separately between outer steps", torch.optim.SGD(averaged.parameters()),
         {"model": averaged}),
        (ValueError, r"train separately .* got ranks \[[01]\], .*QuantizedAdam.* as group=",
         lc.QuantizedAdam(model.parameters()), {}),
        (ValueError, r"train separately .* got ranks \[[01]\], .*SeedReplay.* as group=",
         lc.SeedReplay(ddp_model.Net(), group=dist.group.WORLD), {}),
        (TypeError, r"got 'H' \(did you mean sync_every\?\)", sgd, {"H": 10}),
        (TypeError, r"got 'fragment' \(did you mean fragments\?\)", sgd, {"fragment": 2}),
        (TypeError, "codec: expected a codec's text, got 2", sgd, {"codec": 2}),
        (TypeError, "0: expected a dense floating-point tensor, got .*Int", integers, {}),
        (TypeError, "0: expected a dense floating-point tensor, got .*sparse", sparse, {}),
    ]:  # fmt: skip
        with pytest.raises(error, match=said):
            lc.DiLoCoX(optimizer, 4, **options)
    # The group goes on.
    optimizer = lc.DiLoCoX(sgd, 2, model=model)
    ddp_model.train(model, r.rank, 5, optimizer=optimizer, spare=True)
    optimizer.finish()


def test_without_a_group():
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="call init_process_group"):
        lc.DiLoCoX(torch.optim.SGD(model.parameters()), 4)


@pytest.mark.on("pair", group={})
def test_parameters_may_not_come_or_go(r):
    model, optimizer = diloco_model.fresh()
    with pytest.raises(ValueError, match="add_param_group: expected the parameters that it was made with, got more"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="regroup: expected group= to be a Membership, got a process group"):
        optimizer.regroup()
    for change in (
        lambda p: [*p, nn.Parameter(torch.zeros(3))],
        lambda p: p[1:],
        lambda p: [nn.Parameter(p[0].detach()), *p[1:]],
    ):
        group = optimizer.inner.param_groups[0]
        before = group["params"]
        group["params"] = change(before)
        with pytest.raises(
            ValueError, match=rf"step: expected the 10 parameters .* got {len(group['params'])}, not all"
        ):
            optimizer.step()
        group["params"] = before
    diloco_model.train(model, optimizer, r.rank, range(9))
    optimizer.finish()


@pytest.mark.on("pair", group={})
def test_parameters_that_were_moved(r):
    """A parameter whose elements are elsewhere: the outer loop would average what is no longer trained."""
    model, optimizer = diloco_model.fresh()
    parameter = next(model.parameters())
    parameter.data = parameter.data.clone()
    with pytest.raises(ValueError, match="not all the same, of the same dtype and in the same place"):
        diloco_model.train(model, optimizer, r.rank, range(1))
