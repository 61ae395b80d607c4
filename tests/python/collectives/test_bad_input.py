"""A caller's mistake is ValueError or TypeError before anything is sent, with expected and actual; the group still works."""

import re

import pytest
import torch
import torch.distributed as dist
from group_check import check_group

import torch_lowcomm as lc

# text of a policy -> what the message must name
BAD_POLICIES = {
    "all_gather=foo8": "minmax1...minmax8.*foo8",
    "all_gather=minmax9": "bits.*1.*8.*9",
    "all_gather=minmax8:bucket=1000": "power of two.*1000",
    "reduce_scatter=levels4": "no level table.*levels4",
    "all_gathr=minmax8": "all_gathr.*all_gather",
    "all_gather=minmax8; all_gather=minmax4": "all_gather.*twice",
}
BAD_NUMBERS = {"min_bytes": -1, "seed": -1, "chunk_bytes": 1000, "connections": 0}


def test_bad_options_policies_and_environment(r):
    import os

    for text, named in BAD_POLICIES.items():
        with pytest.raises(ValueError, match=f"(?s){named}"):
            lc.Options(policy=text)
        with pytest.raises(ValueError, match=f"(?s){named}"):
            lc.codec(text.split("=", 1)[1]) if re.match("all_gather=[^;]*$", text) else lc.Options(policy=text)
    for field, value in BAD_NUMBERS.items():
        with pytest.raises(ValueError, match=f"{field}.*{value}"):
            lc.Options(**{field: value})
    r.init("lowcomm")
    for text, named in BAD_POLICIES.items():
        with pytest.raises(ValueError, match=f"(?s){named}"):
            lc.set_policy(None, text)
    check_group(r)
    dist.destroy_process_group()
    for variable, value in [
        ("LOWCOMM_POLICY", "all_gather=foo8"),
        ("LOWCOMM_MIN_BYTES", "few"),
        ("LOWCOMM_SEED", "-3"),
        ("LOWCOMM_NCCL", "2"),
    ]:
        os.environ[variable] = value
        with pytest.raises(ValueError, match=f"{variable}.*{value.split('=')[-1]}"):
            r.init("lowcomm")
        del os.environ[variable]
    assert not dist.is_initialized()
    r.init("lowcomm")
    check_group(r)


def test_wrong_types_and_sizes_within_a_rank(r):
    r.init("lowcomm")
    # Sizes and dtypes that do not fit within one rank: nothing is sent.
    bad = [
        lambda: dist.all_gather_into_tensor(torch.empty(5), torch.ones(3)),
        lambda: dist.all_gather([torch.empty(3)] * (r.size - 1), torch.ones(3)),
        lambda: dist.all_gather([torch.empty(4)] * r.size, torch.ones(3)),
        lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * r.size + 1)),
        lambda: dist.reduce_scatter(torch.empty(3), [torch.ones(4)] * r.size),
        lambda: dist.reduce_scatter(torch.empty(3), [torch.ones(3)] * (r.size + 1)),
    ]
    twice, flat, parts = torch.zeros(3), torch.zeros(6 * r.size), [torch.ones(3)] * r.size
    bad += [
        lambda: dist.all_to_all([twice] * r.size, parts),
        lambda: dist.all_to_all([flat[2 * k :][:3] for k in range(r.size)], parts),
    ]
    for k, call in enumerate(bad):
        with pytest.raises((ValueError, RuntimeError), match=r"(?is)expected.*(got|share)|\d") as failure:
            call()
        assert not isinstance(failure.value, dist.DistBackendError), (k, failure.value)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        dist.all_gather_into_tensor(torch.empty(3 * r.size, dtype=torch.float64), torch.ones(3))
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * r.size, dtype=torch.bfloat16))
    check_group(r)
