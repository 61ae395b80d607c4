"""Parameters of several dtypes in one flat buffer, which FSDP2 gathers as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_lowcomm.fsdp._torch_2_11 import ShardedParameter


def common_unit(parameters: Sequence[tuple[ShardedParameter, bool]]) -> torch.dtype | None:
    """The dtype by which the bytes of one flat buffer can be coded.

    That of all coded parameters, where it is one; the others' bytes travel as `none` elements of it, so each must be whole
    elements of it.

    Args:
        parameters: In the buffer's order, each with whether it is coded.

    Returns:
        The dtype, or None: of one dtype already, nothing coded, coded ones of several dtypes, a parameter that decides
        itself what is gathered, or an odd number of bytes.
    """
    if len({p.gathered_dtype for p, _ in parameters}) < 2 or any(p.has_extension for p, _ in parameters):
        return None
    coded = {p.gathered_dtype for p, is_coded in parameters if is_coded}
    if len(coded) != 1:
        return None
    (unit,) = coded
    whole = all(p.shard_numel * p.gathered_dtype.itemsize % unit.itemsize == 0 for p, _ in parameters)
    return unit if whole else None
