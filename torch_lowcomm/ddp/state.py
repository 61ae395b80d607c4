"""State of the DDP hook: options, what compression keeps of each parameter, and its checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from torch_lowcomm import _C
from torch_lowcomm.codec import codec as checked_codec
from torch_lowcomm.ddp.parameters import Parameters
from torch_lowcomm.ddp.step import Step
from torch_lowcomm.groups import backend_of

logger = logging.getLogger("torch_lowcomm")

_RESIDUALS = ("float32", "int8")


class State:
    """How one DDP model's gradients travel, and what compression has lost of them so far.

        model.register_comm_hook(lc.ddp.State(codec="sym4"), lc.ddp.hook)            # 4 bits an element
        model.register_comm_hook(lc.ddp.State(codec="sym4:bucket=128", rank=4), lc.ddp.hook)

    A bucket's gradients travel in one coded message; norms, biases and every parameter that is not at least 2-D or has
    under 1024 elements in one exact message beside it, as do those that `exact` names. With `rank` a parameter's matrix
    [size(0), the rest] is sent as two factors of that rank, coded too (PowerSGD, arXiv 1905.13727; coded factors:
    DiLoCoX, arXiv 2506.21263), in two messages a bucket of which the second depends on the first: where round trips are
    long, a large `bucket_cap_mb` makes few of them. A matrix whose factors would not be smaller is coded as it is. All
    ranks end with the same bits, on any CPU.

    Error feedback: what coding and rank lose of a gradient, the second encoding of its sum included, is kept by the
    rank that lost it and added to its next one, so that over all ranks and steps the gradients' sum is that of what was
    applied and of the residuals. A gradient that is 0 everywhere on a rank (an unused parameter) sends nothing there,
    and its residual waits. Residuals and factors are keyed by parameter: DDP's rebuilding of its buckets does not touch
    them, and a parameter's result does not depend on the bucket it is in.

    A step is whole or nothing: where a NaN or an infinity is in any gradient of any rank, every rank gets NaN or
    infinities there (with `rank`, in all of that bucket's gradients that travel as factors), a gradient scaler skips the
    step everywhere, and no residual or factor changes. So too when an op fails. Accumulation under `no_sync()` counts as
    one step. Inside `lc.exact()` a step is exact and changes no state.

    Where the group has a policy for all_reduce, the hook wins: gradients are coded once, by the state's codec.
    Collective: ranks compare options here. One State a model.

    Args:
        process_group: That of the DDP model, of backend lowcomm; None for the default one.
        codec: Codec text of what is coded: "sym4:bucket=128", "gauss4:gain=1.011", "qsgd8".... Not by channel.
        rank: Of the factors, 1 or more; None: no factors.
        projection_codec: Codec text of each matrix's first factor, P, where it is not `codec`. What P's codes lose no
            residual brings back to P, which then catches less of the gradient: 8 bits are worth their bytes there
            (benchmarks/results/ddp.md).
        error_feedback: Whether residuals are kept (8 bytes a coded element, in host memory).
        warm_up_steps: So many first steps are exact.
        residual_dtype: "float32", or "int8": 8 bits an element and a scale every 512 (as LoCo, arXiv 2407.04480, keeps
            them), which takes 2 bytes an element, and 4 more while its bucket is under way; what 8 bits cannot hold of a
            residual is lost.
        model: The model, or its DDP wrapper: residuals are then keyed by parameter name. Without it by the order of the
            first backward's buckets, which the same model and bucket_cap_mb make again.
        exact: Called with (name, parameter) of `model`'s; True keeps that parameter exact.
        grad_scaler: The `torch.amp.GradScaler` in use: when its scale changes, residuals follow. Without it, residuals of
            the old scale are added to gradients of the new one, once a change.

    Raises:
        ValueError: A group, codec or number that will not do; `exact` without `model`.
        TypeError: `exact` is no function.
        DistBackendError: Ranks have different options (the first is named), or another rank raised.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        codec: str = "sym4:bucket=1024",
        *,
        rank: int | None = None,
        projection_codec: str | None = None,
        error_feedback: bool = True,
        warm_up_steps: int = 0,
        residual_dtype: str = "float32",
        model: nn.Module | None = None,
        exact: Callable[[str, nn.Parameter], bool] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._backend = backend_of(process_group)
        self._group = process_group if process_group is not None else dist.group.WORLD
        self._step: Step | None = None
        self._steps = 0
        self._scaler, self._scale = grad_scaler, 1.0
        self._said = False
        try:
            self._codec = _poisoning(codec)
            self._projection_codec = self._codec if projection_codec is None else _poisoning(projection_codec)
            if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
                raise ValueError(f"ddp.State: rank: expected 1 or more, or None for no factors, got {rank!r}")
            if projection_codec is not None and rank is None:
                raise ValueError("ddp.State: projection_codec: expected rank= beside it, got none")
            if not isinstance(warm_up_steps, int) or warm_up_steps < 0:
                raise ValueError(f"ddp.State: warm_up_steps: expected 0 or more, got {warm_up_steps!r}")
            if residual_dtype not in _RESIDUALS:
                raise ValueError(f"ddp.State: residual_dtype: expected one of {_RESIDUALS}, got {residual_dtype!r}")
            if exact is not None and not callable(exact):
                raise TypeError(
                    f"ddp.State: exact: expected a function of (name, parameter), got {type(exact).__name__}"
                )
            if exact is not None and model is None:
                raise ValueError("ddp.State: exact: expected model= beside it, whose names it is called with, got none")
            self._warm_up_steps = warm_up_steps
            self._kept = {"rank": rank or 0, "error_feedback": bool(error_feedback), "residual_dtype": residual_dtype}
            self._parameters = Parameters(
                self._backend,
                rank=rank,
                feedback=error_feedback,
                eight_bits=residual_dtype == "int8",
                model=model.module if isinstance(model, DistributedDataParallel) else model,
                exact=exact,
            )
        except Exception as error:
            self._backend.agree_on_texts("ddp.State", [], error=f"{type(error).__name__}: {error}")
            raise
        self._backend.agree_on_texts("ddp.State", list(self._options().items()))
        if any(part.strip().startswith("all_reduce=") for part in self._backend.policy.split(";")):
            logger.info(
                "ddp: group %s has the policy %r, and the hook wins: gradients are coded once, by %s",
                self._backend.group_name,
                self._backend.policy,
                self._codec,
            )

    @property
    def steps(self) -> int:
        """How many steps have begun."""
        return self._steps

    def _options(self) -> dict[str, str]:
        options = {
            "codec": self._codec,
            "projection_codec": self._projection_codec,
            **self._kept,
            "warm_up_steps": self._warm_up_steps,
        }
        options |= {"grad_scaler": self._scaler is not None}
        options |= {"coded parameters": self._parameters.coded()}
        return {name: str(value) for name, value in options.items()}

    def reduce(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Start averaging a bucket; `lc.ddp.hook` calls it, for buckets in their order.

        Returns:
            The future of the bucket's buffer. The last one's ends when all residuals of the step are what they will be.
        """
        if bucket.index() == 0:
            self._begin()
        step = self._step
        if step is None:
            raise ValueError(f"ddp: expected a step's bucket 0 first, got bucket {bucket.index()}")
        entries = [self._parameters.of(parameter) for parameter in bucket.parameters()]
        exact = step.number < self._warm_up_steps or _C.in_exact()
        future = step.reduce(bucket, None if exact else entries)
        if bucket.is_last() and not self._said:
            self._say()
        return future

    def _begin(self) -> None:
        if self._step is not None:
            self._step.roll_back()  # nothing, unless a backward broke off
        self._follow_scale()
        self._step = Step(self._steps, self._group, self._backend, self._codec, self._projection_codec)
        self._steps += 1

    def _follow_scale(self) -> None:
        """Residuals are in the gradients' unit, which a scaler changes (by powers of two as it comes: exactly)."""
        scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        if scale != self._scale and self._steps > 0:
            for entry in self._parameters:
                if entry.compression is not None:
                    entry.compression.scale(scale / self._scale)
        self._scale = scale

    def _say(self) -> None:
        self._said = True
        coded = [entry for entry in self._parameters if entry.compression is not None]
        logger.info(
            "ddp: %d parameters (%d elements) travel by %s%s; %d exact",
            len(coded),
            sum(entry.parameter.numel() for entry in coded),
            self._codec,
            f", {sum(e.compression.rank > 0 for e in coded if e.compression)} of them as factors of rank "
            f"{self._kept['rank']}"
            if self._kept["rank"]
            else "",
            len(list(self._parameters)) - len(coded),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on bit for bit: this rank's residuals, factors, and how many steps there were.

        A checkpoint holds one a rank: `torch.save` on every rank, or `torch.distributed.checkpoint` with `model=` given.
        With more than two ranks what travels exact is, as in DDP without a hook, a sum whose order depends on the
        bucket, and a run's first step has other buckets than later ones: there "bit for bit" is of what is coded.

        Returns:
            {"world_size", "steps", "grad_scale", "rank", "error_feedback", "residual_dtype": of this state,
            "rank<r>.<parameter>.residual": float32 of its shape, or the bytes of 8 bits, "<parameter>.factor": float32
            [rank, columns]}. Not to be written to.
        """
        return {
            "world_size": self._backend.size(),
            "steps": self._steps,
            "grad_scale": self._scale,
            **self._kept,
            **self._parameters.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave on this rank. Between steps.

        Residuals belong to the ranks of one world size, and are not shared out anew for another.

        Raises:
            ValueError: It is that of another world size, rank of the group or kind of state, or does not fit a parameter:
                expected and actual are named, and nothing has changed. Parameters that are yet to be seen raise it then.
        """
        for name, value in {"world_size": self._backend.size(), **self._kept}.items():
            if state.get(name, "none") != value:
                raise ValueError(f"ddp: load_state_dict: {name}: expected {value}, got {state.get(name, 'none')}")
        if self._step is not None:
            self._step.roll_back()  # nothing, unless a backward broke off
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        self._parameters.load(tensors)
        self._steps = int(state["steps"])
        self._scale = float(state["grad_scale"])


def _poisoning(text: str) -> str:
    """The codec with nonfinite=poison: a NaN that one rank has must reach every rank's gradients, and no error."""
    spec = checked_codec(text).spec
    if spec == "none" or "axis=channel" in spec:
        raise ValueError(f"ddp.State: codec: expected one that rounds, in buckets of a flat tensor, got {spec!r}")
    if "nonfinite=saturate" in spec:
        raise ValueError(
            f"ddp.State: codec: expected one by which a NaN arrives, got {spec!r}: leave nonfinite= out, it is poison here"
        )
    if "nonfinite=" in spec:
        return spec
    return checked_codec(f"{spec}{',' if ':' in spec else ':'}nonfinite=poison").spec
