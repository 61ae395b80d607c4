"""The options of the DDP hook's state, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch_lowcomm.codec import codec as checked_codec

_RESIDUALS = ("float32", "int8")


@dataclass(frozen=True)
class StateOptions:
    """What `State` was given, under its names; ranks compare what is checked."""

    codec: str
    projection_codec: str | None
    rank: int | None
    error_feedback: bool
    residual_dtype: str
    warm_up_steps: int

    def checked(self) -> StateOptions:
        """Returns the options with canonical codecs, `projection_codec` always one, and the rank 0 for no factors."""
        coded, rank = _poisoning(self.codec), self.rank
        projection = coded if self.projection_codec is None else _poisoning(self.projection_codec)
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise ValueError(f"ddp.State: rank: expected 1 or more, or None for no factors, got {rank!r}")
        if self.projection_codec is not None and rank is None:
            raise ValueError("ddp.State: projection_codec: expected rank= too, got none")
        if not isinstance(self.warm_up_steps, int) or self.warm_up_steps < 0:
            raise ValueError(f"ddp.State: warm_up_steps: expected 0 or more, got {self.warm_up_steps!r}")
        if self.residual_dtype not in _RESIDUALS:
            raise ValueError(f"ddp.State: residual_dtype: expected one of {_RESIDUALS}, got {self.residual_dtype!r}")
        feedback = bool(self.error_feedback)
        return replace(self, codec=coded, projection_codec=projection, rank=rank or 0, error_feedback=feedback)

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
