"""The cases that are timed: how a step's gradients (and FSDP's weights) travel, by name."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of a data parallel step.

    `backend` is the group's. DDP: `hook` is "" (DDP's own all_reduce), "fp16" or "powersgd" of torch, or "lowcomm" with
    `codec` and `rank`; FSDP2: `weights` and `gradients` are `lc.fsdp.quantize`'s.
    The `base` is the exact step of the same backend, with the same overlap, that bounds are counted from.
    """

    name: str
    backend: str = "lowcomm"
    hook: str = ""
    codec: str = ""
    rank: int | None = None
    weights: str = ""
    gradients: str = ""
    base: bool = False

    @property
    def peer(self) -> bool:
        """Whether it is somebody else's: shown, not gated."""
        return self.backend == "gloo"


# Ratios and speeds are over the first of a method.
CASES = {
    "ddp": [
        Case("gloo fp32", "gloo"),
        Case("gloo, torch's fp16 hook", "gloo", hook="fp16"),
        Case("gloo, torch's PowerSGD rank 2", "gloo", hook="powersgd", rank=2),
        Case("gloo, torch's PowerSGD rank 4", "gloo", hook="powersgd", rank=4),
        Case("lowcomm exact", base=True),
        Case("lowcomm qsgd8", hook="lowcomm", codec="qsgd8:bucket=1024"),
        Case("lowcomm sym4", hook="lowcomm", codec="sym4:bucket=128"),
        Case("lowcomm gauss4", hook="lowcomm", codec="gauss4:gain=1.011"),
        Case("lowcomm rank 2, sym4", hook="lowcomm", codec="sym4:bucket=128", rank=2),
        Case("lowcomm rank 4, sym4", hook="lowcomm", codec="sym4:bucket=128", rank=4),
        Case("lowcomm rank 2, sym8", hook="lowcomm", codec="sym8:bucket=128", rank=2),
        Case("lowcomm rank 4, sym8", hook="lowcomm", codec="sym8:bucket=128", rank=4),
    ],
    "fsdp": [
        Case("gloo fp32", "gloo"),
        Case("lowcomm exact", weights="none", gradients="none", base=True),
        Case("lowcomm W8G8", weights="minmax8:bucket=1024", gradients="qsgd8:bucket=1024"),
        Case("lowcomm W6G4", weights="minmax6:bucket=1024", gradients="qsgd4:bucket=1024"),
        Case("lowcomm W4G4", weights="minmax4:bucket=1024", gradients="qsgd4:bucket=1024"),
    ],
}

# By --model: parameters of the byte-level GPT. "10M" is what the bounds are for, "base" what `convergence` trains,
# "1.6M" what `diloco_lab` does.
MODELS = {
    "10M": {"width": 384, "layers": 6, "heads": 6, "context": 64},
    "1.6M": {"width": 256, "layers": 2, "heads": 4, "context": 64},
    "base": {"width": 128, "layers": 4, "heads": 4, "context": 64},
}
