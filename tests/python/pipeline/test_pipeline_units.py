"""No decoded token tells of another: units of codecs in pipelines."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torch_lowcomm as lc
from torch_lowcomm import _C
from torch_lowcomm.pipeline.units import unit_of

ROOT = Path(__file__).parents[3]
WIDTHS = (576, 1024, 1600)  # SmolLM2, a power of two, GPT2-XL
# All that pages recommend for a pipeline, which the test below looks for.
CODECS = (
    "none",
    "bf16",
    "fp16",
    "gauss2",
    "gauss3",
    "gauss4",
    "gauss6",
    "minmax4:bucket=64",
    "minmax4:bucket=128",
    "minmax4:bucket=256",
    "minmax8:bucket=128",
    "sym8:bucket=128",
    "qsgd4:bucket=64",
)
# Gradients of images in examples/split_learning.py: no activations, and no order in time.
TIED = {"topk:keep=0.2,values=sym8", "mid2:axis=channel", *(f"sym{b}:axis=channel" for b in (3, 4, 6, 8))}
PAGES = (
    "README.md",
    "docs/pipeline.md",
    "docs/subspace.md",
    "examples/train_pipeline.py",
    "examples/train_subspace.py",
    "examples/split_learning.py",
    "torch_lowcomm/pipeline/stage.py",
    "torch_lowcomm/pipeline/edge.py",
    "torch_lowcomm/pipeline/cache.py",
)


def _decoded(codec, x, unit=None):
    elements = unit_of(codec, x.shape, unit, activations=True)
    cast = codec in ("none", "bf16", "fp16")
    return _C.Codec(
        codec if cast or not elements else f"{codec}{',' if ':' in codec else ':'}unit={elements}"
    ).roundtrip(x)


def _told(before, after, changed):
    """How many elements outside of the unit that was replaced have changed."""
    different = before != after
    different[changed] = False
    return int(different.sum())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_token_tells_of_no_other(codec, width):
    dtype = torch.bfloat16 if width == 1024 else torch.float32
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(3, 17, width, generator=generator).to(dtype)
    before = _decoded(codec, x)
    for sample, token in ((0, 1), (1, 16), (2, 0)):
        y = x.clone()
        y[sample, token] = 30 * torch.randn(width, generator=generator).to(dtype)
        assert _told(before, _decoded(codec, y), (sample, token)) == 0, (sample, token)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(4, 28), (4, 3, 28, 28), (5, 7, 9, 16, 2)], ids=str)
def test_a_sample_of_other_shapes_tells_of_no_other(codec, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    before, y = _decoded(codec, x), x.clone()
    y[2] = 30
    assert _told(before, _decoded(codec, y), 2) == 0


def test_without_units_tokens_tell_of_others():
    x = torch.randn(1, 64, 576, generator=torch.Generator().manual_seed(1))
    before, y = _decoded("gauss4", x, "message"), x.clone()
    y[0, 33] = 30
    assert _told(before, _decoded("gauss4", y, "message"), (0, 33)) > 0


def test_pages_recommend_what_is_tested_here():
    texts = re.compile(
        r"[\"'`=]((?:minmax|qsgd|lattice|sym|mid|gauss|levels|topk|sign1)[1-8]?(?::[a-z]\w*=[\w.=,]*\w)?)[\"'`]"
    )
    for page in PAGES:
        lines = (ROOT / page).read_text().splitlines()
        if page == "README.md":  # of its rows those of pipelines
            lines = [line for line in lines if "lc.pipeline" in line or "lc.subspace" in line]
        for found in texts.findall("\n".join(lines)):
            assert found in CODECS or found in TIED or found in _FAMILIES, (
                f"{page} names {found}, which is not tested here"
            )


_FAMILIES = {"minmax", "qsgd", "lattice", "sym", "mid", "gauss", "levels", "topk"}  # a name, not a codec


@pytest.mark.parametrize("codec", sorted(TIED | {"minmax4:bucket=tensor"}))
def test_codecs_that_tie_tokens_together_are_refused(codec):
    x = torch.zeros(2, 8, 64)
    with pytest.raises(ValueError, match='unit="message" allows it'):
        unit_of(codec, x.shape, None, activations=True)
    assert unit_of(codec, x.shape, "message", activations=True) == 0
    assert unit_of(codec, x.shape, None, activations=False) == 0
    assert unit_of(codec, (2, 64), None, activations=True) == 0


def test_no_other_units():
    with pytest.raises(ValueError, match="unit: expected 'token', 'sample', 'message' or None, got 'row'"):
        lc.pipeline.units.expect_unit("row")


def _received(r, channel, cache, options, *, changed):
    """What rank 1 receives in two of four visits of a batch; in the first of them a token may be another."""
    edge = lc.pipeline.Edge(1 - r.rank, channel=channel, cache=cache, **options)
    generator, got = torch.Generator().manual_seed(4), []
    for visit in range(4):
        x = torch.randn(2, 9, 48, generator=generator)
        if visit == 2 and changed:
            x[1, 5] += 20
        samples = None if cache is None else [0, 1]
        if r.rank == 0:
            edge.send(x.requires_grad_(), samples=samples).backward()
        else:
            y = edge.recv(torch.empty_like(x), samples=samples)
            y.sum().backward()
            got.append(y.detach().clone())
    edge.finish()
    return torch.stack(got[2:]) if got else None


@pytest.mark.on("pair", group={})
def test_a_remembered_token_tells_of_no_other(r):
    channel = 0
    for cached in (False, True):
        for options in ({"forward": "gauss4"}, {"forward": "minmax4:bucket=256"}, {"forward": "gauss2"}):
            runs = []
            for changed in (False, True):
                cache = lc.pipeline.Cache(store="minmax8:bucket=128") if cached else None
                runs.append(_received(r, channel, cache, options, changed=changed))
                channel += 1
            if r.rank == 1:
                before, after = runs
                assert _told(before, after, (slice(None), 1, 5)) == 0, options
                # What the memory keeps of a visit is in the next one, too.
                assert bool((before[1] != after[1]).any()) == cached, options


@pytest.mark.on("pair", group={"pg_options": lc.Options(policy="p2p=gauss4", min_bytes=0)})
def test_sends_under_a_policy_that_tie_tokens_are_counted(r):
    for x in (torch.zeros(2, 9, 48), torch.zeros(2, 9, 512), torch.zeros(18, 48)):
        dist.send(x, 1) if r.rank == 0 else dist.recv(x, 0)
    if r.rank == 0:
        sent = next(iter(lc.stats().values()))["send"]
        assert (sent["calls"], sent["without_units"]) == (3, 1)


def test_a_cache_of_another_unit_is_refused(tmp_path):
    slot = lc.pipeline.cache.Slot(0, 0, True)
    cache = lc.pipeline.Cache(store="sym8:bucket=128", folder=tmp_path)
    cache.slots.memory(slot, 4 * 576, 576).restore(
        7, 1, torch.zeros(cache.slots.memory(slot, 4 * 576, 576).slot_bytes, dtype=torch.uint8)
    )
    with pytest.raises(
        ValueError, match="expected slots in sym8:bucket=128, as it has .*unit=576: begin with an empty cache"
    ):
        cache.slots.memory(slot, 4 * 576, 576, 576)
    cache.close()
    again = lc.pipeline.Cache(store="sym8:bucket=128", folder=tmp_path)
    with pytest.raises(ValueError, match="expected slots in sym8:bucket=128"):
        again.slots.memory(slot, 4 * 576, 576, 576)
    again.close()


def test_an_older_state_of_a_cache_is_refused_whole():
    cache = lc.pipeline.Cache(state=True, store="fp32")
    memory = cache.slots.memory(lc.pipeline.cache.Slot(0, 0, True), 4, 4)
    memory.restore(7, 1, torch.zeros(16, dtype=torch.uint8))
    state = cache.state_dict()
    for entry in state["rank0"][3].values():
        entry["channels"] = entry.pop("shape")[0]
    with pytest.raises(ValueError, match="expected a state with the shape of its slots"):
        cache.load_state_dict(state)
    assert memory.version(7) == 1


@pytest.mark.parametrize(("unit", "ndim"), [("token", 4), ("sample", 4), ("token", 2)])
def test_a_unit_that_is_asked_for_is_not_left_out(unit, ndim):
    with pytest.raises(ValueError, match="expected one whose scales belong to a token"):
        unit_of("sym4:axis=channel", (2, 8, 4, 16)[:ndim], unit, activations=True)


@pytest.mark.parametrize("codec", ["minmax4:bucket=64", "gauss4", "minmax8:bucket=128"])
def test_units_whose_codes_are_longer_travel_exact(codec):
    for elements in range(1, 65):
        coded = _C.Codec(f"{codec}{',' if ':' in codec else ':'}unit={elements}").encoded_bytes(6400 * elements)
        for itemsize in (2, 4):
            shorter = lc.pipeline.units.is_shorter(codec, elements, itemsize)
            assert not shorter or coded <= 6400 * elements * itemsize, (elements, itemsize)
    assert not lc.pipeline.units.is_shorter(codec, 1, 4)
    assert lc.pipeline.units.is_shorter(codec, 16, 4)


@pytest.mark.on("pair", group={})
def test_a_number_a_token_travels_exact(r):
    edge = lc.pipeline.Edge(1 - r.rank, forward="gauss4")
    x, mask = torch.randn(2, 9, 48), torch.rand(2, 9, 1, generator=torch.Generator().manual_seed(1))
    if r.rank == 0:
        edge.send((x, mask)).backward()
    else:
        got, got_mask = edge.recv((torch.empty_like(x), torch.empty_like(mask)))
        assert torch.equal(got_mask, mask)
        (got.sum() + got_mask.sum()).backward()
    edge.finish()
