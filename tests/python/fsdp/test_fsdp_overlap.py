"""lc.fsdp.quantize(overlap=True): the same bits as without, earlier gathers, later reductions, and their errors."""

import signal

import pytest
import ranks
import torch
import torch.distributed as dist
from collective_cases import bits
from fsdp_model import WIDTH, Block, batch, expect_lost, loss_of, make_model, train, whole, wrapped
from stages_case import Spoil
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import torch_lowcomm as lc

CODECS = {"weights": "qsgd4:bucket=256", "gradients": "qsgd8:bucket=256"}  # their draws would show another order


class _Skipping(nn.Module):
    """Runs other blocks every pass, with parameters of its own before and after them."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(f"block{k}") for k in range(3))
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        x = self.first(x)
        for k, block in enumerate(self.blocks):
            if (self.passes + k) % 3:
                x = block(x)
        return self.blocks[0](x)


def _model(r, how):
    mesh = init_device_mesh("cpu", (r.size,))
    if how == "HSDP":
        mesh = init_device_mesh("cpu", (2, r.size // 2), mesh_dim_names=("replicate", "shard"))
    if how == "skipping":
        torch.manual_seed(7)
        model = _Skipping()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    dtypes = {
        "bf16, reduced in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        "fp16": {"param_dtype": torch.float16},  # and divided after a SUM
    }
    policy = MixedPrecisionPolicy(**dtypes[how]) if how in dtypes else None
    return make_model(3, mesh=mesh, mp_policy=policy, checkpointed=how == "checkpointed")


def _run(r, how, overlap):
    model = _model(r, how)
    lc.fsdp.quantize(model, **CODECS, overlap=overlap)
    hooked = []
    for module in wrapped(model):
        if how == "compiled":
            module.compile(backend="eager")
        if how == "kept":
            module.set_reshard_after_forward(False)
        if how == "divided":
            module.set_gradient_divide_factor(3.0)
    if how == "hooks":
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: hooked.append((name, p.grad.to_local().clone())))
    losses = train(r, model, 6, accumulate=3 if how == "kept" else 1)
    with torch.no_grad():
        losses = torch.cat([losses, loss_of(model, batch(r.rank, 99))[None]])
    gradients = {f"{name} hooked {i}": g for i, (name, g) in enumerate(hooked)}
    loss_of(model, batch(r.rank, 100)).backward()
    for name, p in model.named_parameters():
        if p.grad is not None:  # of a block that was skipped
            gradients[f"{name}.grad"] = p.grad.to_local().clone()
    return {"losses": losses, **gradients, **whole(model)}


HOWS = ("kept", "checkpointed", "skipping", "divided", "hooks", "compiled", "fp16", "HSDP", "bf16, reduced in fp32")


@pytest.mark.later
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.on("quad")
def test_the_bits_are_those_without_overlap(r, how):
    _expect_same_bits(r, lambda overlap: _run(r, how, overlap))


def _expect_same_bits(r, run):
    found = []
    for overlap in (False, True):
        r.init("lowcomm")
        found.append(run(overlap))
        dist.destroy_process_group()
    want, got = found
    assert want.keys() == got.keys()
    for name, t in want.items():
        assert torch.equal(bits(t), bits(got[name])), name


def _gathers(lc):
    record = lc.flight_record()[dist.group.WORLD.group_name]
    return sum(op["op"] == "all_gather" for op in record["ops"])


def _meets(r, overlap):
    """A rank that computes backward through block 1 waits for the other to compute through block 0: only if it deferred."""
    r.init("lowcomm")
    model = make_model(3, mesh=init_device_mesh("cpu", (r.size,)))
    lc.fsdp.quantize(model, **CODECS, overlap=overlap)
    train(r, model, 1)  # the order of modules is known after a pass
    if not overlap:
        r.set_deadline(5)  # of a rank whose peer gives up
    before, ahead = _gathers(lc), []
    for k, block in enumerate(model):
        block.big.register_forward_pre_hook(lambda *_, k=k: ahead.append(_gathers(lc) - before - (k + 1)))

    def meet(_):
        r.say(f"through block 0 on rank {r.rank}")

    def wait(_):
        r.hear(f"through block 0 on rank {1 - r.rank}", timeout_s=3 if not overlap else 30)

    model[0].back.register_full_backward_pre_hook(lambda *_: meet(_) if r.rank == 0 else None)
    model[1].back.register_full_backward_pre_hook(lambda *_: wait(_) if r.rank == 1 else None)
    # Rank 1 stands in block 1's backward with block 2's reduction issued; rank 0 issues block 1's and must get on to
    # block 0 although rank 1 has not come to it.
    loss_of(model, batch(r.rank, 1)).backward()
    return ahead


def test_a_reduction_goes_on_while_the_next_module_computes(pair):
    assert pair(_meets, True) == [[1, 1, 0]] * 2  # gathers issued beyond those that were needed


def test_without_overlap_it_does_not():
    with pytest.raises(ranks.RanksFailed, match="no rank said"):
        ranks.run_ranks(_meets, 2, False)


def _alive(r, overlap):
    """The most bytes of FSDP2's flat buffers and of gathered parameters alive at any allocation or computation."""
    from torch_lowcomm.fsdp import _torch_2_11 as fsdp2

    model = make_model(6, mesh=init_device_mesh("cpu", (r.size,)))
    seen, peaks = {}, []
    plain = fsdp2.new_buffer

    def note():
        gathered = sum(p.numel() * 4 for m in wrapped(model) for p in m.parameters() if not hasattr(p, "placements"))
        buffers = sum(size for ref, size in seen.values() if not ref.expired())
        peaks.append(gathered + buffers)

    def new_buffer(size, dtype, device):
        buffer = plain(size, dtype, device)
        seen[len(seen)] = StorageWeakRef(buffer.untyped_storage()), buffer.numel() * buffer.element_size()
        note()
        return buffer

    fsdp2.new_buffer = new_buffer
    try:
        lc.fsdp.quantize(model, **CODECS, overlap=overlap)
        for block in model:
            block.big.register_forward_pre_hook(lambda *_: note())
            block.big.register_full_backward_pre_hook(lambda *_: note())
        train(r, model, 3)
    finally:
        fsdp2.new_buffer = plain
    one = sum(p.numel() * 4 for p in model[0].parameters())
    return max(peaks) / one


@pytest.mark.on("pair", group={})
def test_memory_of_one_more_module_at_most(r):
    before, now = _alive(r, False), _alive(r, True)
    assert now <= before + 1.01, (before, now)


@pytest.mark.on(2, allow_exit={1: -signal.SIGKILL})
def test_a_killed_rank_is_named(r):
    r.init("lowcomm", timeout_s=600)
    model = make_model(3, mesh=init_device_mesh("cpu", (r.size,)))
    lc.fsdp.quantize(model, **CODECS)
    train(r, model, 1)
    expect_lost(r, model, 1, r"(?s)(all_gather|reduce_scatter).*rank 1\b")


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_reduction_that_fails_changes_no_gradient(r, accumulated):
    """A reduction that fails leaves the gradients that there were."""
    r.init("lowcomm")
    model = make_model(2, mesh=init_device_mesh("cpu", (r.size,)))
    lc.fsdp.quantize(model, **CODECS)
    if accumulated:
        loss_of(model, batch(r.rank, 0)).backward()
    before = {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}
    x = model[0](batch(r.rank, 1))
    x = model[1](Spoil.apply(x, False, True) if r.rank == 0 else x)  # the first block's gradients, reduced last
    with pytest.raises(ValueError if r.rank == 0 else dist.DistBackendError, match="reduce_scatter|NaN|nan|finite"):
        x.square().mean().backward()
    for name, p in model[0].named_parameters():
        assert (p.grad is not None) == accumulated, name
        assert p.grad is None or torch.equal(p.grad.to_local(), before[f"0.{name}"]), name
    for name, p in model[1].named_parameters():
        assert p.grad is not None, name
        assert not accumulated or not torch.equal(p.grad.to_local(), before[f"1.{name}"]), name


def test_ranks_that_differ_are_told(r):
    r.init("lowcomm")
    model = make_model(mesh=init_device_mesh("cpu", (r.size,)))
    with pytest.raises(dist.DistBackendError, match="with(out)? overlap"):
        lc.fsdp.quantize(model, overlap=r.rank == 0)
    lc.fsdp.quantize(model, overlap=False)


def _broken(r, overlap):
    """A backward that breaks off in the middle, on all ranks; then a whole one, the gradients zeroed in place before it."""
    model = _model(r, "plain")
    lc.fsdp.quantize(model, weights="none", gradients="none", overlap=overlap)
    loss_of(model, batch(r.rank, 0)).backward()

    def breaks(*_):
        raise RuntimeError("broken off")

    handle = model[0].register_full_backward_hook(breaks)
    with pytest.raises(RuntimeError, match="broken off"):
        loss_of(model, batch(r.rank, 1)).backward()
    handle.remove()
    seen = {f"{name} broken": p.grad.to_local().clone() for name, p in model.named_parameters()}
    model.reset_iter_state()  # FSDP2's own, after a pass that broke off; later torch drops the gradients there
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    loss_of(model, batch(r.rank, 2)).backward()
    return seen | {name: p.grad.to_local().clone() for name, p in model.named_parameters()}


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot go on after a broken pass")
def test_gradients_after_a_backward_that_broke_off_are_those_without_overlap(r):
    _expect_same_bits(r, lambda overlap: _broken(r, overlap))
