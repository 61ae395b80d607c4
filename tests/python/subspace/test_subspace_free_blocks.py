"""Free blocks behind the last boundary: what is constrained, cut, checked, saved and trained of a decoder that has some."""

import copy

import pytest
import subspace_case as case
import test_subspace_pipeline as pipelines
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import torch_lowcomm as lc


def _constrained(free, dtype=torch.float64, layers=case.LAYERS, seed=0):
    return lc.subspace.constrain(case.gpt(dtype, layers=layers, seed=seed), case.RANK, free_blocks=free, sigma=1.0)


def _outside(model):
    """By block and role, the share of a weight's norm outside the subspace."""
    basis = model.subspace_basis
    found = {}
    for number, block in enumerate(model.blocks):
        for role, linear in (("out", block.attention.out), ("down", block.down)):
            rows = linear.weight.detach().T.double()
            found[number, role] = float((rows - basis.project(rows)).norm() / rows.norm())
    return found


@pytest.mark.parametrize("free", [None, 0, 1, 3])
def test_the_last_blocks_are_as_they_were(free):
    """One by default, as in the paper; the others are constrained, and the report and the log's text say so."""
    options = {} if free is None else {"free_blocks": free}
    before, model = case.gpt(), case.constrained(**options)
    free = 1 if free is None else free
    found = _outside(model)
    for number, (old, new) in enumerate(zip(before.blocks, model.blocks, strict=True)):
        is_free = number >= case.LAYERS - free
        for mine, theirs in ((new.attention.out, old.attention.out), (new.down, old.down)):
            assert hasattr(mine, "subspace_role") == hasattr(mine, "subspace_basis") == (not is_free)
            assert torch.equal(mine.weight, theirs.weight) == is_free
        assert (found[number, "out"] > 0.5, found[number, "down"] > 0.5) == (is_free, is_free)
    report = model.subspace_report
    assert report.free_blocks == model.subspace_basis.free_blocks == free
    assert len(report.lost) == 1 + 2 * (case.LAYERS - free)
    assert (f"but of the last {free}, fixed part" in str(report)) == (free > 0)
    assert lc.subspace.check(model) == []


# Free blocks, blocks of the stages.
CUTS = [(0, [1, 1, 1, 1]), (1, [4]), (1, [2, 1, 1]), (1, None), (2, [2, 2]), (2, [1, 3]), (3, [1, 3])]


@pytest.mark.parametrize(("free", "sizes"), CUTS)
def test_a_cut_is_the_uncut_model(free, sizes):
    """In loss and gradients, after a step that has taken the free weights out of the subspace, too."""
    model, ids = _constrained(free), case.ids()
    cuts = case.cuts(model, len(sizes or "two"), blocks=sizes)
    assert [lc.subspace.check(stage) for stage in cuts] == [[]] * len(cuts)
    assert abs(model(ids, ids).item() - case.loss(case.logits(model, ids), ids).item()) < 1e-13
    optimizer = lc.SubspaceAdamW(model, lr=1e-2)
    for _ in range(2):
        case.expect_uncut(model, cuts, ids)
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = _outside(model)
    for (number, _), outside in found.items():
        assert (outside > 1e-4) == (number >= case.LAYERS - free), found
    assert model.subspace_basis.free_blocks == cuts[0].subspace_basis.free_blocks == free


@pytest.mark.parametrize("name", case.FAMILIES)
def test_a_family(name):
    pytest.importorskip("transformers", reason="no package transformers")
    model, ids = lc.subspace.constrain(case.family(name), case.RANK, free_blocks=2), case.ids(96)
    before = case.family(name).model.layers
    for number, block in enumerate(model.model.layers):
        assert torch.equal(block.mlp.down_proj.weight, before[number].mlp.down_proj.weight) == (number >= 2)
    case.expect_uncut(model, case.cuts(model, 2), ids)
    tokens = lc.subspace.generate(lc.subspace.cut(model, 0, 1), ids, max_new_tokens=5)
    assert torch.equal(tokens, case.by_hand(model, ids, 5))


def test_no_boundary_behind_a_free_block():
    model = _constrained(2)
    message = (
        r"expected the last boundary before block 2, the first of 2 free ones, or further to the front, got one before block 3: "
        r"give the last stage 2 blocks or more \(blocks=\), or constrain the decoder with free_blocks=1 at most"
    )
    for options in ({"count": 4}, {"count": 2, "blocks": [3, 1]}):
        with pytest.raises(ValueError, match=message):
            lc.subspace.cut(model, 0, **options)
    lc.subspace.cut(model, 0, 1)  # has no boundary
    lc.subspace.cut(model, 0, 4, boundary=case.WHOLE)  # asks nothing of weights


def test_what_free_blocks_may_have():
    """A dropout behind a projection, a trained bias, and a weight of the head: no boundary comes after them."""
    model = case.gpt()
    last = model.blocks[3]
    last.down = nn.Sequential(nn.Linear(4 * case.WIDTH, case.WIDTH, dtype=torch.float64), nn.Dropout(0.5))
    with pytest.raises(ValueError, match="blocks.3.down to be an nn.Linear, got Sequential"):
        lc.subspace.constrain(model, case.RANK)
    last.down = last.down[0]
    last.register_forward_hook(lambda _module, _inputs, output: nn.functional.dropout(output, 0.5, last.training))
    last.up.weight = nn.Parameter(last.up.weight.detach().clone())
    last.attention_norm.weight = model.norm.weight
    with pytest.raises(ValueError) as refused:
        lc.subspace.constrain(model, case.RANK, free_blocks=0)
    for reason in ("blocks.3.down.bias: a trained bias", "attention_norm.weight: is shared with norm.weight"):
        assert reason in str(refused.value)
    last.attention_norm.weight, shared = nn.Parameter(model.norm.weight.detach().clone()), model.norm.weight
    last.down.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"blocks.3: a share 0\.\d+ of its output is lost"):
        lc.subspace.constrain(model, case.RANK, free_blocks=0)
    last.attention_norm.weight = shared
    last.down.bias.requires_grad_(True)
    model = lc.subspace.constrain(model, case.RANK)
    assert lc.subspace.check(model) == []
    model.eval()
    ids = case.ids()
    assert case.apart(case.chain(case.cuts(model, 4), ids), case.logits(model, ids)) < 1e-12
    model.blocks[2].attention_norm.weight = model.norm.weight
    assert "shared with" in "\n".join(map(str, lc.subspace.check(model)))


def test_a_checkpoint_of_other_free_blocks_is_refused():
    """By decoders and stages, with both numbers, before anything of it is taken; of as many it is loaded by any cut."""
    trained, ids = _constrained(2, seed=1), case.ids()
    with torch.no_grad():
        for p in trained.parameters():
            p.mul_(1.5)
    state = lc.subspace.merge_states(stage.state_dict() for stage in case.cuts(trained, 3, blocks=[1, 1, 2]))
    assert state.keys() == trained.state_dict().keys()
    again = _constrained(2)
    for stage in case.cuts(again, 2):
        stage.load_state_dict(state)
    assert torch.equal(again(ids, ids), trained(ids, ids)) and again.subspace_basis.free_blocks == 2
    for free in (0, 1):
        other = _constrained(free)
        before = copy.deepcopy(other.state_dict())
        message = (
            rf"with free_blocks={free}, as this one was constrained, got one with free_blocks=2: load it into .*=2\)"
        )
        for module in (other, *case.cuts(other, 2), copy.deepcopy(other)):
            with pytest.raises(ValueError, match=message):
                module.load_state_dict(state)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    with pytest.raises(ValueError, match="subspace_basis._extra_state: expected the same on all stages"):
        lc.subspace.merge_states([case.cuts(again, 2)[0].state_dict(), case.cuts(other, 2)[1].state_dict()])


def _stepped(free, **options):
    """A decoder and its optimizer after a step."""
    model, ids = _constrained(free), case.ids()
    optimizer = lc.SubspaceAdamW(model, **options)
    model(ids, ids).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("variant", ["rows", "project_all"])
def test_moments_of_other_free_blocks_are_refused(variant):
    optimizers = {free: _stepped(free, variant=variant)[1] for free in (1, 2)}
    before = copy.deepcopy(optimizers[2].state_dict())
    message = "free_blocks: expected the state of a decoder with free_blocks=2, got one with free_blocks=1"
    with pytest.raises(ValueError, match=message):
        optimizers[2].load_state_dict(optimizers[1].state_dict())
    after = optimizers[2].state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(t, before["state"][n][key]) for n, of in after["state"].items() for key, t in of.items())
    optimizers[2].load_state_dict(before)


def test_a_distributed_checkpoint_of_other_free_blocks_is_refused(tmp_path):
    """Which is read in place: the model's number is none of the tensors that are written to."""
    runs = {free: _stepped(free) for free in (1, 2)}
    state = {"model": runs[1][0].state_dict(), "optimizer": get_optimizer_state_dict(*runs[1])}
    dcp.save(state, checkpoint_id=tmp_path)
    model, _ = runs[2]
    given = {"model": model.state_dict()}
    dcp.load(given, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="with free_blocks=2, .* got one with free_blocks=1"):
        model.load_state_dict(given["model"])
    assert model.subspace_basis.free_blocks == 2
    with pytest.raises(ValueError, match="with free_blocks=2, got one with free_blocks=1"):
        set_optimizer_state_dict(*runs[2], state["optimizer"])


def test_coordinates_of_a_stage_of_free_blocks():
    """`reparam` on every rank: there is nothing to do on the last."""
    model, ids = case.constrained(), case.ids()
    stages = case.cuts(model, 4)
    whole = case.chain(stages, ids)
    last = {name: p.detach().clone() for name, p in stages[3].named_parameters()}
    for stage in stages:
        assert lc.subspace.reparam(stage) is stage
    assert case.apart(case.chain(stages, ids), whole) < 1e-12
    assert "blocks.2.down.coordinates" in dict(stages[2].named_parameters())
    assert all(torch.equal(p, last[name]) for name, p in stages[3].named_parameters())


@pytest.mark.parametrize(("layers", "free", "sizes"), [(4, 1, None), (6, 2, [1, 1, 1, 3])])
@pytest.mark.on("quad", group={}, timeout=120)
def test_stages_with_free_blocks_train(r, layers, free, sizes):
    """Real stages, the last one of free blocks alone or with constrained ones."""
    model = lc.subspace.constrain(case.gpt(layers=layers), case.RANK, sigma=1.0, free_blocks=free)
    module = lc.subspace.cut(model, r.rank, r.size, blocks=sizes)
    stage = lc.pipeline.Stage(module, r.rank, r.size, torch.device("cpu"))
    optimizer = lc.SubspaceAdamW(module, lr=1e-2)
    schedule = lc.pipeline.Schedule1F1B(stage, pipelines.MICRO, loss_fn=case.loss)
    pipelines.train(range(12), schedule, optimizer)
    groups = {(g["basis_checksum"], g["free_blocks"]) for g in optimizer.param_groups}
    assert groups == {(module.subspace_basis.checksum, free)}
    assert lc.subspace.check(module) == []
    distances = {name: off for name, off in optimizer.distances().items() if name.startswith("blocks")}
    assert all(off < 1e-12 for off in distances.values())
    outside = {}
    for number, block in module.subspace_parts.blocks_of(module):
        rows = block.down.weight.detach().T
        outside[number] = float((rows - module.subspace_basis.project(rows)).norm() / rows.norm())
    assert all((off > 1e-2) == (number >= layers - free) for number, off in outside.items()), outside
    states = [None] * r.size
    dist.all_gather_object(states, module.state_dict())
    again = lc.subspace.constrain(case.gpt(layers=layers, seed=1), case.RANK, free_blocks=free, sigma=1.0)
    merged = lc.subspace.merge_states(states)
    assert merged["blocks.0.down.weight"].shape == again.blocks[0].down.weight.shape
    again.load_state_dict(merged | {name: t for name, t in again.state_dict().items() if name not in merged})
    tokens = lc.subspace.generate(stage, case.ids(), max_new_tokens=4)
    assert torch.equal(tokens, case.by_hand(again, case.ids(), 4))
