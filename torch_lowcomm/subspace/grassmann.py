"""Steps of the subspace itself, towards the directions that gradients want: on the Grassmann manifold."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_lowcomm import _C
from torch_lowcomm._all_gather_json import all_gather_json
from torch_lowcomm._ddp_around import without_ddp
from torch_lowcomm.subspace.basis import Basis
from torch_lowcomm.subspace.weights import wide

logger = logging.getLogger(__name__)


class GradientSum:
    """S̄, the sum of GᵀG over the gradients of activations behind a boundary, before they are projected.

    It is `total`, [width, width]; None before the first. A gradient that is not finite is left out: a gradient scaler skips
    its step. Of a `lc.pipeline.Stage` only micro-batches count: torch runs a stage's module once on made-up tensors, forward
    and backward, to learn the shapes.
    """

    def __init__(self, stage: Any = None) -> None:
        self.total: Tensor | None = None
        self.stage = stage

    @property
    def counts(self) -> bool:
        """Whether what the module computes now is part of a step."""
        return self.stage is None or self.stage.in_micro_batch

    def add(self, gradient: Tensor) -> None:
        """Adds a gradient [..., width]; a tensor's hook."""
        flat = wide(gradient.detach().reshape(-1, gradient.shape[-1]))
        if not torch.isfinite(flat).all():
            return
        if self.total is None:
            self.total = flat.new_zeros(flat.shape[1], flat.shape[1])
        self.total = self.total.to(flat)  # of a loaded state
        self.total.addmm_(flat.t(), flat)


def turned(vectors: Tensor, total: Tensor, rate: float) -> Tensor:
    """One step of the subspace (section 4.5 of the paper): the new Uᵀ, or `vectors` itself where the sum is 0.

    With U the basis, d×k, and S̄ `total`, the sum of GᵀG [width, width], divided by its trace: U' = U + rate·2·(I − UUᵀ)·S̄·U, the
    step against the gradient of what of the gradients lies outside the subspace, then orthonormalised (the QR factor whose R has
    a positive diagonal). `vectors` is Uᵀ, float64 [rank, width]; a sum that is not finite is a ValueError.
    """
    total = total.to(vectors)
    trace = total.trace()
    if not torch.isfinite(total).all():
        raise ValueError("subspace: Grassmann step: expected finite gradients, got NaN or infinity in their sum")
    if trace <= 0:
        return vectors
    moved = vectors @ (total / trace)
    step = moved - (moved @ vectors.t()) @ vectors
    rows = (vectors + 2 * rate * step).cpu().contiguous()
    _C.orthonormalise(rows)
    return rows.to(vectors.device)


class Grassmann:
    """Turns the subspace every so many steps, in all stages at once.

        subspace = lc.subspace.Grassmann(stages, optimizer, every=500)
        for x, y in batches:
            schedule.step(...)
            optimizer.step()
            subspace.step()                # on every rank

    The stage that receives last sums GᵀG of the gradients that come to its boundary (`GradientSum`), and at the end of an
    interval makes the next basis of it. All ranks get the basis, tell each other that they have it, and only then change: they
    project their constrained weights and momenta, and count the basis's version on. A rank that dies before all have it leaves
    the others at the old version; one that dies later leaves them at the new one, once they have called `resume`.
    """

    def __init__(
        self,
        stages: Iterable[Any],
        optimizer: Any,
        *,
        every: int = 500,
        rate: float = 1.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Watches the gradients of the last boundary, where this rank has it.

        Args:
            stages: This rank's `lc.pipeline.Stage`s of modules that `cut` made, or such modules, with an exact boundary.
            optimizer: Of the stages' parameters: `lc.SubspaceAdamW`, or one that has its `change_basis`.
            every: Steps of an interval, 1 or more.
            rate: α, the size of a step of the subspace, above 0; the paper gives no number.
            group: All ranks of the pipeline, and only those; None for the default group. Of replicas of a pipeline the group has
                the ranks of all: their sums are added.
        """
        if not hasattr(optimizer, "change_basis"):
            raise TypeError(
                f"subspace: Grassmann: expected an optimizer with change_basis, lc.SubspaceAdamW, got {type(optimizer).__name__}"
            )
        if every < 1:
            raise ValueError(f"subspace: every: expected 1 or more, got {every}")
        if not 0 < rate < float("inf"):
            raise ValueError(f"subspace: rate: expected a finite number above 0, got {rate}")
        stages = list(stages)
        modules = [without_ddp(getattr(stage, "submod", stage)) for stage in stages]
        cut = [m for m in modules if hasattr(m, "block_numbers")]
        found = [m.subspace_basis for m in cut if isinstance(getattr(m, "subspace_basis", None), Basis)]
        if len(found) != len(modules) or not found:
            raise ValueError("subspace: Grassmann: expected stages that lc.subspace.cut made of a constrained decoder")
        self._bases = list({id(basis): basis for basis in found}.values())
        self._optimizer, self._every, self._rate, self._group = optimizer, every, rate, group
        self._steps, self._compared = 0, False
        self._pending: tuple[int, Tensor] | None = None
        self._sum: GradientSum | None = None
        for stage, module in zip(stages, modules, strict=True):
            if module.is_last:
                if not module.exact or module.decode is None:
                    raise ValueError(
                        "subspace: Grassmann: expected an exact boundary before the last of two stages or more"
                    )
                self._sum = module.decode.gradients = GradientSum(None if stage is module else stage)
                self._dtype = torch.float64 if module.coefficient_dtype == torch.float64 else torch.float32

    @property
    def version(self) -> int:
        """How often the subspace has been turned."""
        return self._bases[0].version

    def step(self) -> bool:
        """Counts a step, on every rank after the optimizer's; returns whether it ended an interval and turned the subspace.

        Raises:
            ValueError: No finite gradient has come to the last boundary, or their sum is not finite, or in the first step ranks
                have other intervals; on all ranks, and nothing has changed but that the sum begins anew.
            torch.distributed.DistBackendError: A peer or the network failed. Once there is a group again, `resume`.
        """
        self._steps += 1
        if not self._compared:
            self._compare()
        if self._steps % self._every:
            return False
        self._exchange()
        self._confirm()
        self._commit()
        return True

    def _compare(self) -> None:
        """Refuses other intervals on other ranks, of which some would wait for a switch while others train on."""
        self._expect_same(self._every, "Grassmann: every: expected the same on all ranks, got {}")
        self._compared = True

    def _exchange(self) -> None:
        """All ranks get the next basis from the one that made it."""
        basis = self._bases[0]
        total = self._sum.total if self._sum is not None else None
        dtype = torch.float64
        sums = torch.zeros(basis.width, basis.width, dtype=dtype) if total is None else total.to("cpu", dtype)
        # The lowest rank that has a sum makes the basis, of the sums of all.
        size = dist.get_world_size(self._group)
        mine = torch.tensor([size if total is None else dist.get_rank(self._group)])
        dist.all_reduce(mine, dist.ReduceOp.MIN, group=self._group)
        maker = int(mine)
        if maker == size:
            raise ValueError("subspace: Grassmann step: expected gradients at the last boundary, got none on any rank")
        owners = torch.tensor([int(total is not None)])
        dist.all_reduce(owners, group=self._group)
        if int(owners) > 1:
            dist.all_reduce(sums, group=self._group)
        message = torch.zeros(basis.rank * basis.width + 1, dtype=dtype)
        if dist.get_rank(self._group) == maker:
            try:
                message[1:] = turned(basis.vectors, sums, self._rate).flatten().cpu()
                message[0] = basis.version + 1
            except ValueError:
                message[0] = -1
        source = dist.get_global_rank(self._group, maker) if self._group is not None else maker
        dist.broadcast(message, source, group=self._group)
        if message[0] < 0:
            if self._sum is not None:
                self._sum.total = None
            raise ValueError("subspace: Grassmann step: expected finite gradients, got NaN or infinity in their sum")
        self._pending = (int(message[0]), message[1:].view(basis.rank, basis.width))

    def _confirm(self) -> None:
        """Returns once every rank has the next basis; also compares their versions."""
        assert self._pending is not None
        version, _ = self._pending
        self._expect_same(version, f"Grassmann step: expected version {version} on all ranks, got {{}}")

    def _commit(self) -> None:
        """Changes this rank's bases, weights and momenta; collective over shards, and changes nothing where it fails."""
        assert self._pending is not None
        version, vectors = self._pending
        old = self._bases[0].vectors.clone()
        new = vectors.to(old.device)
        self._optimizer.change_basis(old, new)
        for basis in self._bases:
            basis.change(new)
        self._pending = None
        if self._sum is not None:
            self._sum.total = None
        logger.info("subspace: version %d", version)

    def resume(self, group: dist.ProcessGroup | None = None) -> int:
        """After a failure: brings all ranks to one version, which it returns, on the group that has been made since; all call it.

        A rank that had the next basis takes it where any other has changed already, for then all had it.

        Args:
            group: The new group; None for the default group.

        Raises:
            ValueError: Ranks have other intervals or have counted other numbers of steps, or a rank's version is older than
                another's and it has no basis to go on with: it was restarted from an older checkpoint. On all ranks.
            torch.distributed.DistBackendError: A peer or the network failed.
        """
        self._group = group
        self._compare()
        equally = "expected equally many steps on all ranks, got {}; load a checkpoint of one step on all"
        self._expect_same(self._steps, equally)
        newest = max(all_gather_json(self.version, self._group))
        if self._pending is not None and self._pending[0] == newest:
            self._commit()
        self._pending = None
        one = f"expected version {newest} on all ranks, got {{}}; load a checkpoint of one version on all"
        self._expect_same(self.version, one)
        return newest

    def state_dict(self) -> dict[str, Any]:
        """Steps so far, and in the stage that receives last the sum of GᵀG; versions and bases are the model's.

        The state of that stage is one for all stages, of whichever cut: what the others do not need they leave. All stages may
        also save theirs into one distributed checkpoint.
        """
        state: dict[str, Any] = {"steps": self._steps}
        if self._sum is not None:
            basis, total = self._bases[0], self._sum.total
            zeros = basis.vectors.new_zeros(basis.width, basis.width, dtype=self._dtype)
            state["sum"] = zeros if total is None else total.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; a basis of a switch that failed is forgotten. The rank that receives last refuses a
        state without a sum, which is another stage's.
        """
        if self._sum is not None and "sum" not in state:
            raise ValueError(
                "subspace: Grassmann: expected a state with the sum of gradients, of the stage that received last, got another's"
            )
        self._steps, self._pending = state["steps"], None
        if self._sum is not None:
            self._sum.total = state["sum"].clone() if state["sum"].any() else None

    def _expect_same(self, number: int, expected: str) -> None:
        """Refuses other numbers on other ranks, on all of them; `expected` has a place for what all ranks have."""
        found = all_gather_json(number, self._group)
        if len(set(found)) > 1:
            raise ValueError(f"subspace: {expected.format(found)}")
