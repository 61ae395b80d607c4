"""lc.subspace.check, and constrain and cut, which call it: all that keeps a boundary from being exact is found, and named."""

import logging
import re

import pytest
import subspace_case as case
import torch
from model import VOCABULARY, Config
from torch import nn

import torch_lowcomm as lc

_ONES = torch.ones(1, 1, case.WIDTH)


class _Block(nn.Module):
    """A block whose sums are a function of the stream, of what is added, and of a trained parameter."""

    def __init__(self, block, add=lambda x, y, _: x + y, trained=_ONES, behind=None):
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm = block.attention_norm, block.attention, block.mlp_norm
        self.up, self.down, self.add, self.trained = block.up, block.down, add, nn.Parameter(trained.double())
        self.behind = (behind or nn.Identity()).double()

    def forward(self, x, gate=1.0):
        x = self.add(x, gate * self.behind(self.attention(self.attention_norm(x))), self.trained)
        return self.add(x, gate * self.down(nn.functional.gelu(self.up(self.mlp_norm(x)))), self.trained)


class _InPlace(_Block):
    """A block that writes to its input."""

    def forward(self, x):
        x += self.attention(self.attention_norm(x))
        x += self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))
        return x


class _Masked(nn.Module):
    """A block that needs more than activations."""

    def __init__(self, block):
        super().__init__()
        self.attention, self.down, self.block = block.attention, block.down, block

    def forward(self, x, mask):
        return self.block(x) * mask


class _Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(case.WIDTH))

    def forward(self, x):
        return self.gamma * x


class _Decoder(nn.Module):
    """A decoder whose forward is a function of its parts."""

    def __init__(self, forward, wrap=lambda block: block):
        super().__init__()
        whole = case.gpt()
        self.embed, self.norm, self.head = whole.embed, whole.norm, whole.head
        self.blocks = nn.ModuleList(wrap(block) for block in whole.blocks)
        self.function = forward

    def forward(self, ids):
        return self.function(self, self.embed(ids))


def _chain(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def _right(m, x):
    return m.head(m.norm(_chain(m.blocks, x)))


def _of_functions(m, x):
    x = nn.functional.rms_norm(_chain(m.blocks, x), (case.WIDTH,), m.norm.weight, m.norm.eps)
    return nn.functional.linear(x, m.head.weight)


def _state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def _expect_as_it_was(model, before):
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _refused(model, message, **options):
    """The error of `constrain`, which leaves the decoder as it was."""
    before, mode = _state(model), model.training
    with pytest.raises(ValueError, match=message) as error:
        lc.subspace.constrain(model, case.RANK, **options)
    _expect_as_it_was(model, before)
    assert model.training == mode and not hasattr(model, "subspace_basis")
    return str(error.value)


_LOST = r"blocks\.2: a share 0\.\d+ of its output is lost at the boundary behind it"
_TAKES = r"\(.*\) takes a share 0\.\d+ of a projection's output out of the subspace"
BLOCKS = {
    "dropout": ({"behind": nn.Dropout(0.1)}, rf"blocks\.2\.behind: Dropout{_TAKES}"),
    "post-norm": ({"behind": nn.RMSNorm(case.WIDTH)}, rf"blocks\.2\.behind: RMSNorm{_TAKES}"),
    "layer norm": ({"behind": nn.LayerNorm(case.WIDTH)}, rf"blocks\.2\.behind: LayerNorm{_TAKES}"),
    "LayerScale": ({"behind": _Gain()}, rf"blocks\.2\.behind: _Gain{_TAKES}"),
    "a norm behind the sum": ({"add": lambda x, y, _: nn.functional.rms_norm(x + y, (case.WIDTH,))}, _LOST),
    "a scaled stream": ({"add": lambda x, y, _: 0.9 * x + y}, _LOST),
    "a trained scale of the stream": ({"add": lambda x, y, g: g * x + y, "trained": _ONES[..., :1]}, _LOST),
    "a gain that is no module": ({"add": lambda x, y, g: x + g * y, "trained": _ONES[0, 0]}, _LOST),
    "a gain of three dimensions": ({"add": lambda x, y, g: x + g * y, "trained": _ONES}, _LOST),
    "a bias of zeros": ({"add": lambda x, y, g: x + y + g, "trained": 0 * _ONES}, _LOST),
}


@pytest.mark.parametrize("what", BLOCKS)
@pytest.mark.parametrize("weights", ["drawn", "zeros"])
def test_a_block_that_leaves_the_subspace(what, weights):
    """Refused though its boundaries may be exact today: gains are 1 and biases 0 as a block is made, and weights may be 0."""
    options, message = BLOCKS[what]
    model = case.gpt()
    for block in model.blocks if weights == "zeros" else ():
        nn.init.zeros_(block.attention.out.weight)
        nn.init.zeros_(block.down.weight)
    model.blocks[2] = _Block(model.blocks[2], **options)
    assert "blocks.1" not in _refused(model, message)
    model.blocks[2] = _Block(model.blocks[2])
    lc.subspace.constrain(model, case.RANK)
    for stage in case.cuts(model, 2):  # the stage of block 2 has no embedding
        blocks = stage.get_submodule("blocks")
        assert lc.subspace.check(stage) == []
        if stage.index == 1:
            blocks["2"] = _Block(blocks["2"], **options)
            assert re.search(message, str(lc.subspace.check(stage)[0]))


FINE = {
    "identity": {},
    "no dropout": {"behind": nn.Dropout(0.0)},
    "a norm without a gain": {"behind": nn.RMSNorm(case.WIDTH, elementwise_affine=False)},
    "a factor of what is added": {"add": lambda x, y, g: x + g.mean() * y, "trained": _ONES},
}


@pytest.mark.parametrize("what", FINE)
def test_what_may_stand_behind_a_projection(what):
    model = case.gpt()
    model.blocks[1] = _Block(model.blocks[1], **FINE[what])
    assert lc.subspace.check(lc.subspace.constrain(model, case.RANK)) == []


def test_dropout_before_a_projection():
    """Both runs draw the same numbers, whatever is drawn between blocks."""
    model = _Decoder(lambda m, x: _right(m, x + 0 * torch.rand(())))
    for block in model.blocks:
        block.up = nn.Sequential(block.up, nn.Dropout(0.5))
    assert lc.subspace.check(lc.subspace.constrain(model, case.RANK)) == []


def test_as_many_tokens_as_dimensions():
    model = type(case.gpt())(Config(width=VOCABULARY, layers=2, heads=4, context=48))
    assert lc.subspace.check(lc.subspace.constrain(model, case.RANK)) == []


def test_a_block_that_needs_another_argument_is_named():
    model = case.gpt()
    model.blocks[2] = _Masked(model.blocks[2])
    assert "blocks.1" not in _refused(model, r"blocks.2: does not run as a stage calls it.*TypeError.*'mask'")
    model = _Decoder(lambda m, x: m.head(m.norm(m.blocks[3](_chain(m.blocks[:3], x), 1.0))))
    model.blocks[3] = _Masked(model.blocks[3])  # free
    _refused(model, r"blocks.3: does not run as a stage calls it.*TypeError.*'mask'")


def _given(path, source):
    return rf"{path}: is given something else than the output of {source}, by a share"


def _skip_connection(m, x):
    return m.head(m.norm(m.blocks[3](m.blocks[2](first := m.blocks[0](x)) + m.blocks[1](first) - first)))


DECODERS = {
    "a scaled embedding": (lambda m, x: _right(m, 5 * x), r"embed: it is scaled by 5 before the first block"),
    "dropout of the embedding": (
        lambda m, x: _right(m, nn.functional.dropout(x, 0.1)),
        r"embed: a dropout, norm or other module changes it by a share 0.\d+ before the first block",
    ),
    "computed positions": (
        lambda m, x: _right(m, x + 0.5),
        r"positions: something is added to every sequence behind the embedding",
    ),
    "a prefix": (lambda m, x: _right(m, torch.cat((x, x), 1)), "embed: a dropout, norm or other module changes it"),
    "a block is left out": (
        lambda m, x: m.head(m.norm(_chain([m.blocks[i] for i in (0, 1, 3)], x))),
        r"blocks\.2: is called 0 times in a forward pass",
    ),
    "a block comes twice": (lambda m, x: m.head(m.norm(_chain([*m.blocks, m.blocks[3]], x))), "blocks.3: is called 2"),
    "another order": (
        lambda m, x: m.head(m.norm(_chain([m.blocks[i] for i in (0, 2, 1, 3)], x))),
        _given("blocks.1", "blocks.0"),
    ),
    "a scale between blocks": (
        lambda m, x: m.head(m.norm(_chain(m.blocks[2:], 0.5 * _chain(m.blocks[:2], x)))),
        _given("blocks.2", "blocks.1"),
    ),
    "parallel blocks": (_skip_connection, _given("blocks.2", "blocks.1")),
    "another argument": (
        lambda m, x: m.head(m.norm(m.blocks[3](m.blocks[2](_chain(m.blocks[:2], x), gate=0.5)))),
        r"blocks\.2: returns something else on its input alone, as a stage calls it, by a share",
    ),
    "a sum before the norm": (lambda m, x: m.head(m.norm(_chain(m.blocks, x) + x)), _given("norm", "blocks.3")),
    "no norm": (lambda m, x: m.head(_chain(m.blocks, x)), _given("head", "norm")),
    "dropout before the head": (
        lambda m, x: m.head(nn.functional.dropout(m.norm(_chain(m.blocks, x)), 0.1)),
        _given("head", "norm"),
    ),
    "a scale behind the head": (
        lambda m, x: 2 * _right(m, x),
        r"head: the decoder returns something else than its output, by a share 1",
    ),
}


@pytest.mark.parametrize("what", DECODERS)
def test_a_decoder_that_is_not_its_parts_in_order(what):
    forward, message = DECODERS[what]
    model = _Decoder(forward, _Block)
    _refused(model, message)
    with pytest.raises(ValueError, match=f"stages would compute something else than the decoder: {message}"):
        lc.subspace.cut(model, 0, 2, boundary=case.WHOLE)
    _expect_as_it_was(model, _state(model))
    model.function = _right
    lc.subspace.constrain(model, case.RANK)
    assert lc.subspace.check(model) == []
    model.function = forward
    (finding,) = lc.subspace.check(model)
    assert re.search(message, str(finding))


RIGHT = {"in place": (_right, _InPlace), "functions": (_of_functions, lambda block: block), "gates": (_right, _Block)}


@pytest.mark.parametrize("what", RIGHT)
def test_a_decoder_that_is(what):
    model, ids = lc.subspace.constrain(_Decoder(*RIGHT[what]), case.RANK), case.ids()
    assert lc.subspace.check(model) == []
    with torch.no_grad():
        assert case.apart(case.chain(case.cuts(model, 3), ids), model(ids)) < 1e-12


def _with_rows(size=48):
    """A decoder that adds trained rows to its embedding, for as many tokens."""
    model = _Decoder(lambda m, x: _right(m, x + m.rows if size == case.TIME else x + m.rows[: x.shape[1]]))
    model.rows = nn.Parameter(torch.randn(size, case.WIDTH, dtype=torch.float64))
    return model


def test_a_table_of_positions():
    model = _with_rows()
    _refused(model, "rows: is in no block, embedding, norm or head: .* positions= names")
    model.rows.requires_grad_(False)
    _refused(model, r"rows: is added to the embedding: name it by positions='rows'")
    assert lc.subspace.constrain(model, case.RANK, positions="rows").subspace_parts.positions == "rows"
    model.rows.requires_grad_(True)
    assert "rows: trained positions" in str(lc.subspace.check(model)[0])


def _cut(model, _rank):
    return lc.subspace.cut(model, 0, 2, boundary=case.WHOLE)


@pytest.mark.parametrize("make", [lc.subspace.constrain, _cut], ids=["constrain", "cut"])
def test_a_decoder_that_cannot_be_called_is_told(make, caplog):
    """A decoder of one context: a parameter that is in no part is found all the same, and so is a block."""
    model = _with_rows(case.TIME)
    with pytest.raises(ValueError, match="rows: is in no block, embedding, norm or head"):
        make(model, case.RANK)
    model.rows.requires_grad_(False)
    with caplog.at_level(logging.WARNING, logger="torch_lowcomm.subspace"):
        make(model, case.RANK)
    (told,) = caplog.messages
    message = "check: _Decoder could not be called with tokens alone, [2, 4]: what it computes besides its parts"
    assert told.startswith(message)
    if make is lc.subspace.constrain:
        model.blocks[0] = _Block(model.blocks[0], behind=nn.Dropout(0.1))
        assert "blocks.0.behind: Dropout" in str(lc.subspace.check(model)[0])


def test_a_decoder_that_returns_no_logits_is_told(caplog):
    model = _Decoder(lambda m, x: _of_functions(m, x).mean())
    with caplog.at_level(logging.WARNING, logger="torch_lowcomm.subspace"):
        lc.subspace.constrain(model, case.RANK)
    assert caplog.messages == [
        "check: head is not called, and no logits are returned: what follows the blocks is not known"
    ]


def test_blocks_on_the_meta_device_do_not_run(caplog):
    model = case.constrained()
    model.blocks[1].to("meta")
    assert lc.subspace.check(model) == []
    assert caplog.messages == [
        "check: blocks.1.attention_norm.weight is sharded or on the meta device: neither its block nor the whole decoder is run"
    ]
    model.blocks[2] = _Block(model.blocks[2], behind=nn.Dropout(0.1))
    assert "blocks.2.behind: Dropout" in str(lc.subspace.check(model)[0])
    assert lc.subspace.check(model.to("meta")) == []


def test_check_changes_nothing():
    model = case.constrained(torch.float32).eval()
    before, state = _state(model), torch.random.get_rng_state()
    lc.subspace.check(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    _expect_as_it_was(model, before)
    assert not any(module.training for module in model.modules())


def test_a_weight_that_has_moved():
    model = case.constrained(torch.float32)
    before = _state(model)
    with torch.no_grad():
        model.blocks[1].down.weight[3, 4] += 1
        model.embed.weight[7] += 0.1
    found = {finding.module: finding.reason for finding in lc.subspace.check(model)}
    assert set(found) == {"blocks.1.down.weight", "embed.weight"}
    moved, basis = model.blocks[1].down.weight.detach(), model.subspace_basis
    share = case.apart(basis.project_weight(moved), moved)
    assert found["blocks.1.down.weight"] == f"a share {share:.3g} of its norm is outside the subspace"
    model.load_state_dict(before)
    assert lc.subspace.check(model) == []


def test_biases():
    model = case.gpt()
    model.blocks[2].down.bias = nn.Parameter(torch.ones(case.WIDTH, dtype=torch.float64))
    _refused(model, r"blocks.2.down.bias: a trained bias leaves the subspace")
    bias = model.blocks[2].down.bias.requires_grad_(False)
    lc.subspace.constrain(model, case.RANK)
    assert case.apart(model.subspace_basis.project(bias), bias) < 1e-14 and lc.subspace.check(model) == []
    bias[0] += 1
    assert "blocks.2.down.bias: a share" in str(lc.subspace.check(model)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, caplog):
    name = str(dtype).removeprefix("torch.")
    _refused(case.gpt(dtype), rf"blocks.0.attention.out: adds to the residual stream in {name}")
    with caplog.at_level(logging.WARNING, logger="torch_lowcomm.subspace"):
        model = case.constrained(dtype, allow_half=True)
    assert caplog.text.count(f"not exact: blocks.2.down: adds to the residual stream in {name}") == 1
    assert all(finding.half for finding in lc.subspace.check(model))
    model = case.gpt(torch.float32)
    model.blocks[2] = _Block(model.blocks[2], behind=_Gain())
    assert "blocks.2.behind: _Gain" in _refused(model.to(dtype), "blocks.2.behind", allow_half=True)
