"""SubspaceAdamW: AdamW whose constrained weights stay in the subspace."""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_lowcomm._adam_groups import rules_of
from torch_lowcomm._option_table import expect_integer
from torch_lowcomm.diloco.parameters import local
from torch_lowcomm.subspace.basis import without_autocast
from torch_lowcomm.subspace.optimizer_parameters import SubspaceOptimizer
from torch_lowcomm.subspace.weights import distances, expect_in_subspace, shards, sum_numbers, sum_slices

logger = logging.getLogger(__name__)

_VARIANTS = ("rows", "project_all")


class SubspaceAdamW(SubspaceOptimizer):
    """AdamW for a model, or a stage of one, whose weights `lc.subspace.constrain` has put into a subspace S = col(U).

        optimizer = lc.SubspaceAdamW(stage.submod, lr=3e-4)
        schedule.step(x)
        optimizer.clip_grad_norm(1.0, stages=pipeline_group)
        optimizer.step()
        optimizer.zero_grad()

    Protocol Models, section 5, equations 12 to 14, with projected gradients. The gradients of the constrained weights, which are
    attention outputs (W_p1), feed-forward down projections (W_p2) and trained embeddings (T_S), leave S. They are projected onto
    S first, G ← U·UᵀG, before clipping and moments: only then do a pipeline whose boundaries carry coordinates and one process
    train the same weights. From there:

    * W_p2 has moments of the coordinates C = UᵀG [k, hidden units] and one second moment a hidden unit, the mean of its d
      squares: M ← β1·M + (1−β1)·C, v ← β2·v + (1−β2)·Σ_i C_ij²/d, W ← (1−lr·weight_decay)·W − lr·U·(M̂/(√v̂+eps)). The update
      lies in S, so the weight is never projected. The moments take k/(2d) of the memory that AdamW's take.
    * W_p1 and T_S, and biases of W_p1 and W_p2, have AdamW's elementwise moments, and the update D = M̂/(√v̂+eps) is projected:
      W ← (1−lr·weight_decay)·W − lr·U·UᵀD.
    * Everything else takes torch's fused AdamW, to the bit.

    Coordinates that `lc.subspace.reparam` has put in the place of weights take the same steps: training is the same to rounding.
    W_p2's step then needs no matrix product, and W_p1's two of four.

    Constrained weights are found when the optimizer is made, after `fully_shard` where there is one. Of DTensors each rank moves
    its shard; UᵀG of a weight that is sharded along the axis on which U acts is a sum over shards, exact, one all_reduce a step
    for all weights, and one more for W_p1.

    Arithmetic and moments have the parameter's dtype, for bfloat16 and float16 float32; then what rounding takes from a parameter
    is kept in float32 for the next step. On CUDA tensors torch's operations do the same, without kernels of this library.

    Gradients of constrained weights stay as they are in `.grad`; clipping multiplies those of other parameters in place, in
    `step`. A parameter without a gradient is skipped. A gradient scaler works (call `unscale_` before clipping): it skips a step
    whose gradients are not finite, and one whose norm of all stages is not.

    Args:
        params: A module, or parameter groups whose "params" is a module or named parameters of `module`.
        lr: Learning rate.
        betas: β1 and β2.
        eps: Is added to the denominator.
        weight_decay: Decoupled: W ← W − lr·weight_decay·W. It keeps a weight in S.
        variant: "rows" as above; "project_all" treats W_p2 as W_p1.
        check_every: Steps between checks that all weights are still in S; 0: none. A check costs about what a step does.
        module: The model whose parameters the groups list.

    Raises:
        TypeError: An option or a parameter has another type than expected.
        ValueError: A number or the variant is wrong; the roles of parameters are not known; bases differ; a weight is outside S
            by more than 1e-3 of its norm (float32), named with its distance.
    """

    # With this attribute a gradient scaler passes its scale and what it found to step(), which also asks the other stages' norm.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        variant: str = "rows",
        check_every: int = 100,
        module: nn.Module | None = None,
    ) -> None:
        if variant not in _VARIANTS:
            raise ValueError(
                f"SubspaceAdamW: variant: expected one of {', '.join(_VARIANTS)} (lc.subspace.reparam has coordinates as "
                f"parameters), got {variant!r}"
            )
        expect_integer("SubspaceAdamW: check_every", check_every)
        if check_every < 0:
            raise ValueError(f"SubspaceAdamW: check_every: expected 0 or more, got {check_every}")
        self._check_every, self._steps, self._told = check_every, 0, False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, variant, module)
        self._expect_in_subspace()
        if self._basis is None:
            logger.warning(
                "SubspaceAdamW: expected a model that lc.subspace.constrain or cut has constrained, got one without: all "
                "parameters take AdamW's steps, as torch.optim.AdamW makes them. Constrained weights are found as the optimizer "
                "is made: constrain first"
            )

    @without_autocast
    @torch.no_grad()
    def clip_grad_norm(
        self, max_norm: float, *, stages: dist.ProcessGroup | None = None, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Makes the next step as if the gradients' norm were `max_norm`, where it is larger; theirs after their projection.

        The norm is that of all stages of a pipeline and of all shards. Sums over tensors are exact, so that it has the same bits
        however the model is cut. Call it between `backward` and `step`, after `GradScaler.unscale_`.

        Args:
            max_norm: The largest norm, 0 or more.
            stages: The ranks that hold the pipeline's stages, a rank each (of a mesh: one column of it). All of them call it.
                None: this optimizer has the whole model; of some stages alone it is the norm of those, which is logged.
            error_if_nonfinite: Whether a norm that is not finite is a ValueError, on all ranks.

        Returns:
            The norm, a float64 scalar.
        """
        if not float(max_norm) >= 0:
            raise ValueError(f"SubspaceAdamW: clip_grad_norm: max_norm: expected 0 or more, got {max_norm}")
        self._expect_usable()
        if stages is None:
            self._tell_of_other_stages()
        self._gradients.begin_clipping()
        gradients = self._project()
        squares = self._core.squares(gradients)
        groups = [
            tuple(g for _, g in shards(p)) if w is None else w.others
            for p, w in zip(self._trained, self._weights(), strict=True)
        ]
        device = self._trained[0].device if self._trained else torch.device("cpu")
        norm = sum_numbers(list(zip(squares, groups, strict=True)), stages, device) ** 0.5
        if error_if_nonfinite and not math.isfinite(norm):
            self._gradients.forget()
            raise ValueError(
                f"SubspaceAdamW: clip_grad_norm: expected gradients with a finite norm, got {norm} over all stages"
            )
        return self._gradients.clip(norm, float(max_norm))

    def _tell_of_other_stages(self) -> None:
        """Warns once where stages would clip by norms of their own, and train otherwise than one process."""
        here = {stage.index for stage in self._stages}
        if self._told or not here or len(here) == self._stages[0].count:
            return
        self._told = True
        logger.warning(
            "SubspaceAdamW: clip_grad_norm: expected stages=, the group of all %d stages, got None: the norm is that of stage %s "
            "alone, and stages clip by different ones",
            self._stages[0].count,
            " and ".join(map(str, sorted(here))),
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes a step. Collective over a mesh whose ranks hold shards; never over the stages.

        Args:
            closure: Computes the gradients again and returns the loss, which is then returned.

        Raises:
            TypeError: A gradient is sparse.
            ValueError: A gradient has another shape, or is of a parameter that was frozen before; gradients have changed since
                `clip_grad_norm`; U is another than the weights are in; or a weight is outside S. Nothing has changed.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        try:
            self._step()
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # the scaler multiplies by what an earlier call has left
                self.__dict__.pop(name, None)
            raise
        return result

    @without_autocast
    def _step(self) -> None:
        self._expect_usable()
        if self._gradients.is_spoilt(getattr(self, "found_inf", None)):
            self._gradients.forget()
            return
        if self._check_every and self._steps and self._steps % self._check_every == 0:
            self._expect_in_subspace()
        gradients, scale = self._project(), self._gradients.scale(getattr(self, "grad_scale", None))
        parameters = [local(p) for p in self._trained]
        rules = rules_of(self.param_groups)
        sum_slices(self._weights(), self._core.form(parameters, gradients, rules, scale))
        self._core.apply(parameters, rules)
        self._steps += 1
        self._gradients.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; what `clip_grad_norm` found is forgotten."""
        self._gradients.forget()
        super().zero_grad(set_to_none)

    def _expect_in_subspace(self) -> None:
        expect_in_subspace([w for w in self._weights() if w is not None], self.distances())

    def _project(self) -> list[torch.Tensor | None]:
        return self._gradients.project(self._core, self._trained, self._weights(), self._known)

    @without_autocast
    def distances(self) -> dict[str, float]:
        """By name of each constrained weight: ‖W − U·UᵀW‖ / ‖W‖, its part outside S. Collective where weights are sharded."""
        self._expect_own_basis()
        with torch.no_grad():
            return distances(list(self._constrained.values()))
