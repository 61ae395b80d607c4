"""Parameters of several dtypes in one flat buffer, which FSDP2 gathers as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_lowcomm.fsdp._torch_2_11 import ShardedParameter


def common_unit(parameters: Sequence[tuple[ShardedParameter, bool]]) -> torch.dtype | None:
    """Returns the dtype as which the bytes of one flat buffer can be coded.

    It is the dtype of all coded parameters. The bytes of the others are sent as `none` elements of this dtype, so that each of
    them must be whole elements of it.

    Args:
        parameters: (parameter, whether it is coded), in the buffer's order.

    Returns:
        The dtype. None if all parameters have one dtype already, none is coded, coded ones have several dtypes, a parameter
        decides itself what is gathered, or a parameter's bytes are not whole elements.
    """
    if len({p.gathered_dtype for p, _ in parameters}) < 2 or any(p.has_extension for p, _ in parameters):
        return None
    coded = {p.gathered_dtype for p, is_coded in parameters if is_coded}
    if len(coded) != 1:
        return None
    (unit,) = coded
    whole = all(p.shard_numel * p.gathered_dtype.itemsize % unit.itemsize == 0 for p, _ in parameters)
    return unit if whole else None
