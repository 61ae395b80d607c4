"""lc.pipeline where something is wrong: mistakes before anything is sent, stages that differ, numbers that are none."""

import logging

import pytest
import stages_case as case
import torch
import torch.distributed as dist
from kept_log import kept_log
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torch_lowcomm as lc
from torch_lowcomm.pipeline import boundary_module


@pytest.mark.on("pair", group={})
def test_mistakes_are_named_before_anything_is_sent(r):
    cache = lc.pipeline.Cache()
    schedule, _ = case.build(r.rank, r.size, "GPipe", cache=cache, **case.CODED)
    x, y = case.batch()
    with pytest.raises(ValueError, match="samples: expected each once in a batch, got sample 3 again"):
        case.step(schedule, samples=[3] * case.ROWS)
    with pytest.raises(ValueError, match="expected a multiple of the 4 micro-batches, got 15"):
        case.step(schedule, x[:15], y[:15], samples=range(15))
    with pytest.raises(ValueError, match="expected one for each of the batch's 16 rows, got 12"):
        case.step(schedule, samples=range(12))
    with pytest.raises(ValueError, match="a step with a cache: expected samples="):
        case.step(schedule, samples=None)
    case.step(schedule)
    other = type(schedule)(schedule._stage, 2, loss_fn=case.loss)
    with pytest.raises(ValueError, match="expected a schedule of 4 micro-batches, as before, got 2"):
        case.step(other)
    case.step(schedule)
    for options, said in (
        ({"cache": cache}, "forward: expected a codec of changes with a cache, got None"),
        ({"cache": cache, "forward": "none"}, "forward: expected a codec of changes with a cache, got none"),
        ({"cache": True, "forward": "gauss2"}, "cache: expected an lc.pipeline.Cache, got True"),
        ({"window": 0}, "window: expected 1 or more, got 0"),
        ({"forward": "sym99"}, "sym99"),
    ):
        with pytest.raises(TypeError if options.get("cache") is True else ValueError, match=said):
            case.build(r.rank, r.size, "GPipe", **options)
    with pytest.raises(ValueError, match="store: expected 'fp32', 'fp16', 'bf16' or a codec, got 'int4'"):
        lc.pipeline.Cache(store="int4")


def _leave(r):
    """Ends the group once both stages have heard: one that leaves before the other resets its connections."""
    r.meet()
    dist.destroy_process_group()


@pytest.mark.on("pair", group={})
def test_stages_of_another_codec_are_named(r):
    schedule, _ = case.build(r.rank, r.size, "GPipe", forward=("sym8:bucket=128", "sym4:bucket=128")[r.rank])
    said = "codec differs: rank 0 has 'sym8:bucket=128,unit=24', rank 1 has 'sym4:bucket=128,unit=24'"
    with pytest.raises(dist.DistBackendError, match=said):
        case.step(schedule)
    _leave(r)


@pytest.mark.on("pair", group={})
def test_other_samples_on_the_two_sides_are_named(r):
    schedule, _ = case.build(r.rank, r.size, "GPipe", cache=lc.pipeline.Cache(), **case.CODED)
    with pytest.raises(dist.DistBackendError, match="samples differs: rank 0 has '0@0,1@0,2@0,3@0', rank 1 has '9@0,"):
        case.step(schedule, samples=range(9 * r.rank, 9 * r.rank + 16))
    with pytest.raises(
        RuntimeError, match="a message of an earlier step failed; call lc.pipeline.reset.*samples differs"
    ):
        case.step(schedule)
    _leave(r)


@pytest.mark.on("pair", group={})
def test_messages_are_counted_by_boundary_and_direction(r):
    """Samples by boundary and direction, the error of their changes, records, and the warning that a cache is of no use."""
    cache = lc.pipeline.Cache()
    schedule, _ = case.build(r.rank, r.size, "GPipe", cache=cache, **case.CODED)
    generator = torch.Generator().manual_seed(1)
    y = torch.zeros(case.ROWS, 3, case.WIDTH)
    with kept_log(logging.WARNING) as said:
        for visit in range(8):
            x = torch.randn(case.ROWS, 3, case.WIDTH, generator=generator)  # another input at every visit
            case.step(schedule, x, y)
            assert len(said) == (r.rank == 0 and visit >= 5), "told after 16 messages of third and later visits, once"
    figures = lc.stats()[dist.group.WORLD.group_name]
    if r.rank == 0:
        assert "boundary 0: after their second visit" in said[0]
        sent = figures["send forward boundary 0"]
        assert sent["calls"] == 8 * case.MICRO and sent["exact_calls"] == 0
        samples = sent["samples"]
        assert (samples["first"], samples["seen"], samples["overflow"]) == (case.ROWS, 7 * case.ROWS, 0)
        assert samples["forgotten"] == {}
        assert 0.3 * samples["mean_value"] < samples["mean_change"] < 2 * samples["mean_value"]
        assert 0.07 < sent["relative_error"] < 0.13, "of the changes, at 4 bits"
        assert figures["recv backward boundary 0"]["calls"] == 8 * case.MICRO
    else:
        assert figures["recv forward boundary 0"]["samples"] is None
        assert figures["send backward boundary 0"]["relative_error"] > 0
    (record,) = lc.flight_record().values()
    sends = [op["op"] for op in record["ops"] if "boundary 0" in op["op"]]
    way, verb = ("forward", "send") if r.rank == 0 else ("backward", "send")
    number = 3 if r.rank == 0 else 8 * 256 + 3
    assert f"{verb} of channel {number}, {way} boundary 0, micro-batch 3, tensor 0" in sends, sends
    # The other side has lost its cache: what it does not remember is counted.
    other = cache if r.rank == 0 else lc.pipeline.Cache()
    schedule, _ = case.build(r.rank, r.size, "GPipe", cache=other, **case.CODED)
    case.step(schedule, x, y)
    if r.rank == 0:
        samples = lc.stats()[dist.group.WORLD.group_name]["send forward boundary 0"]["samples"]
        assert samples["forgotten"] == {"differs": case.ROWS}


class _Half(torch.nn.Linear):
    """A module with a part of the interface."""

    message_codec = "gauss4"


def test_a_module_with_a_part_of_the_interface_is_refused():
    plain, half = torch.nn.Linear(2, 2), _Half(2, 2)
    assert boundary_module.boundary_module(plain).message_codec is None
    with pytest.raises(
        TypeError, match=r"_Half: expected all of lc\.pipeline\.BoundaryModule, got .* without message_finite"
    ):
        boundary_module.boundary_module(half)


class _Whole(_Half):
    message_finite, message_options, message_context_names = True, {}, ()

    def message_context(self, *_, **__):
        return {}


def test_what_torch_wraps_keeps_the_interface():
    for wrapped in (torch.compile(_Whole(2, 2)), checkpoint_wrapper(_Whole(2, 2))):
        module = boundary_module.boundary_module(wrapped)
        assert (module.message_codec, module.message_finite) == ("gauss4", True)
    with pytest.raises(TypeError, match="without message_finite"):
        boundary_module.boundary_module(torch.compile(_Half(2, 2)))
