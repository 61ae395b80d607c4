"""The options of the DDP hook's state, checked."""

from __future__ import annotations

from dataclasses import dataclass

from torch_lowcomm.codec import codec as checked_codec

_RESIDUALS = ("float32", "int8")


@dataclass(frozen=True)
class StateOptions:
    """What `State` was given, with codecs in canonical text; ranks compare it."""

    codec: str
    projection_codec: str
    rank: int  # 0: no factors
    error_feedback: bool
    residual_dtype: str
    warm_up_steps: int

    @classmethod
    def checked(
        cls,
        codec: str,
        projection_codec: str | None,
        rank: int | None,
        error_feedback: bool,
        residual_dtype: str,
        warm_up_steps: int,
    ) -> StateOptions:
        """Checks the arguments of `State`.

        Raises:
            ValueError: A codec or number is wrong.
        """
        coded = _poisoning(codec)
        projection = coded if projection_codec is None else _poisoning(projection_codec)
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise ValueError(f"ddp.State: rank: expected 1 or more, or None for no factors, got {rank!r}")
        if projection_codec is not None and rank is None:
            raise ValueError("ddp.State: projection_codec: expected rank= too, got none")
        if not isinstance(warm_up_steps, int) or warm_up_steps < 0:
            raise ValueError(f"ddp.State: warm_up_steps: expected 0 or more, got {warm_up_steps!r}")
        if residual_dtype not in _RESIDUALS:
            raise ValueError(f"ddp.State: residual_dtype: expected one of {_RESIDUALS}, got {residual_dtype!r}")
        return cls(coded, projection, rank or 0, bool(error_feedback), residual_dtype, warm_up_steps)

    def of_state(self) -> dict[str, object]:
        """Those that a saved state depends on."""
        return {name: getattr(self, name) for name in ("rank", "error_feedback", "residual_dtype")}


def _poisoning(text: str) -> str:
    """Returns the codec with nonfinite=poison: a NaN of one rank must reach every rank's gradients and raise no error."""
    spec = checked_codec(text).spec
    if spec == "none" or "axis=channel" in spec:
        raise ValueError(f"ddp.State: codec: expected one that rounds, in buckets of a flat tensor, got {spec!r}")
    if "nonfinite=" in spec:
        return spec
    return checked_codec(f"{spec}{',' if ':' in spec else ':'}nonfinite=poison").spec
