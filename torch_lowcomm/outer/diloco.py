"""DiLoCoX: an outer loop around any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torch_lowcomm import _C
from torch_lowcomm.membership import Membership
from torch_lowcomm.outer.checkpoint import packed, saved, unpacked
from torch_lowcomm.outer.elastic import Elastic
from torch_lowcomm.outer.groups import chosen, own_backend
from torch_lowcomm.outer.options import checked
from torch_lowcomm.outer.parameters import local, named_buffers, named_parameters


class DiLoCoX(torch.optim.Optimizer):
    """An optimizer around an optimizer: ranks train separately and average their changes every `sync_every` steps.

        opt = lc.DiLoCoX(torch.optim.AdamW(model.parameters(), lr=1e-3), sync_every=100, model=model)
        for batch in data:
            model(batch).backward()
            opt.step()
            opt.zero_grad()
        opt.finish()

    The pseudo-gradient is the difference by which training has moved the parameters. Every `sync_every` inner steps it is
    compressed and averaged over the group while training goes on. The average is the gradient of an outer step of SGD with
    Nesterov momentum (DiLoCo, arXiv 2311.08105; overlapped and compressed: DiLoCoX, arXiv 2506.21263; in fragments:
    Streaming DiLoCo, arXiv 2501.18512). The outer parameters are a float32 copy in host memory and end every outer step
    with the same bits on all ranks. The model's own parameters differ between outer steps, and with a delay always:
    evaluate and save under `outer_parameters()`.

    Use a DiLoCoX in place of the optimizer: schedulers, clipping, gradient scalers and `state_dict` work on it. Parameters
    may be plain, under DDP, shards of FSDP2 or HSDP (each rank averages its shards with the ranks that hold the same
    shards), or the stage of a pipeline. All ranks of the group start with equal parameters.

    The next `step()` raises an error that occurred meanwhile. Outer parameters, momentum, residuals and factors are then as
    after the last outer step, and messages under way are dropped. Training can go on, or start from `restore()`.

    Collective over the group, and over `cluster`.

    Args:
        optimizer: The inner optimizer, of any kind.
        sync_every: H, inner steps from one outer step to the next.
        mode: "sync" waits for the average, as DiLoCo does. In the other modes the average takes a whole interval, and
            training goes on meanwhile from another point: "continue" from the outer parameters plus what this rank has
            trained since, "restart" from the outer parameters, "eager" from an outer step with this rank's part alone.
        model: Names the tensors in checkpoints; None for numbers in the optimizer's order.
        group: The group to average over, of backend lowcomm; None for the default group. Its ranks hold the same
            parameters, or the same shards or stage. The loop makes a separate group of these ranks. Or a `Membership` of
            machines that come and go, with one process each (`regroup`); a machine that comes takes the others' model.
        cluster: The ranks that hold the other shards or stages of this rank's model; `adapt_sync_every` needs it.
        mesh: In place of group and cluster: a DeviceMesh whose first dimension is the group and whose second dimension, if
            any, is the cluster.
        outer_lr: γ.
        outer_momentum: μ; None for 0.9 with mode "sync" and 0.6 with others.
        sync_warmup: Number of first outer steps that wait as in mode "sync". DiLoCoX's paper gives no number; a tenth of all is
            our choice.
        codec: Codec text of the pseudo-gradients, e.g. "sym4:bucket=128", "gauss2"; None sends them in float32.
        rank: Rank r of the two factors that are sent in place of a matrix (PowerSGD, arXiv 1905.13727) and are coded by
            `codec`; None for no factors. A matrix [size(0), the rest] whose factors would not be smaller is coded as it is.
        projection_codec: Codec text of each first factor; None for `codec`.
        error_feedback: Whether the loss of compression is added to the next pseudo-gradient. None: with any codec except
            "gauss", which loses little. Residuals and their copy take 8 bytes an element in host memory.
        residual_dtype: "float32", or "int8" for residuals of 1 byte an element between outer steps.
        adapt_rank: Whether the rank r_t follows the averages' effective rank (arXiv 2506.21263, section 2.4.3).
        adapt_sync_every: Whether the interval follows r_t too: H·r_t/r.
        min_rank: The least rank.
        min_sync_every: The least interval, in inner steps.
        window: Number of outer steps over which r_t is a mean.
        energy: Share of the squared singular values that counts for the effective rank.
        rank_rule: In place of that mean: a function from the effective ranks of all outer steps so far to a number in
            [1, rank].
        sync_rule: In place of H·r_t/r: a function from r_t to the interval in inner steps.
        fragments: Number of parts of the parameters. Each part has separate outer steps, spread evenly over the interval.
        fragment_sync_delay: Inner steps from a fragment's pseudo-gradient to its outer step; None for a whole interval (or
            0 with mode "sync").
        fragment_update_alpha: Mode "restart": the share of the rank's own parameters that remains after an outer step.
        average_buffers: Whether every outer step also averages the model's floating-point buffers, exactly.
        check_every: Outer steps between comparisons of a checksum of the outer parameters; 0 for never.
        seed: Seed of the first factors and of codecs that round at random.
        resume: With a Membership: what `state_dict` returned on this machine, in a group of any size. It is loaded before
            the machines meet; the state of the most advanced machine counts.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An option or a parameter is wrong.
        DistBackendError: Ranks have different options, parameters or values (the first is named), another rank raised, or a
            peer failed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sync_every: int,
        *,
        mode: str = "continue",
        model: nn.Module | None = None,
        group: dist.ProcessGroup | Membership | None = None,
        cluster: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float | None = None,
        sync_warmup: int = 0,
        codec: str | None = "sym4:bucket=128",
        rank: int | None = None,
        projection_codec: str | None = None,
        error_feedback: bool | None = None,
        residual_dtype: str = "float32",
        adapt_rank: bool = False,
        adapt_sync_every: bool = False,
        min_rank: int = 1,
        min_sync_every: int = 1,
        window: int = 5,
        energy: float = 0.95,
        rank_rule: Callable[[Sequence[float]], float] | None = None,
        sync_rule: Callable[[float], int] | None = None,
        fragments: int = 1,
        fragment_sync_delay: int | None = None,
        fragment_update_alpha: float = 0.0,
        average_buffers: bool = False,
        check_every: int = 10,
        seed: int = 0,
        resume: dict[str, Any] | None = None,
    ) -> None:
        over, parts = chosen(group, cluster, mesh)
        self._elastic = Elastic(over, fragments) if isinstance(over, Membership) else None
        self._groups: list[dist.ProcessGroup] = []  # that this loop made
        backend = cluster_backend = None
        if not isinstance(over, Membership):
            group_made, backend = own_backend(over)
            # Other shards and stages may have tensors of the same names: the first rank of the group tells them apart.
            self._shared = f"outer{dist.get_process_group_ranks(group_made)[0]}"
            self._own = f"rank{dist.get_rank()}"
            self._groups.append(group_made)
        else:
            self._shared, self._own = "outer", over.machine_id
        if parts is not None:
            cluster_made, cluster_backend = own_backend(parts)
            self._groups.append(cluster_made)
        try:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"DiLoCoX: expected an optimizer, got {type(optimizer).__name__}")
            if isinstance(optimizer, DiLoCoX):
                raise TypeError("DiLoCoX: expected an inner optimizer, got a DiLoCoX: one outer loop a model")
            if isinstance(model, DistributedDataParallel):
                model = model.module
            if resume is not None and not isinstance(over, Membership):
                raise ValueError(
                    "DiLoCoX: resume: expected group= to be a Membership, got a process group: load_state_dict"
                )
            if average_buffers and model is None:
                raise ValueError("DiLoCoX: average_buffers: expected model= too, got none")
            options = checked(
                {
                    "sync_every": sync_every,
                    "mode": mode,
                    "outer_lr": outer_lr,
                    "outer_momentum": outer_momentum,
                    "sync_warmup": sync_warmup,
                    "codec": codec,
                    "projection_codec": projection_codec,
                    "rank": rank,
                    "error_feedback": error_feedback,
                    "residual_dtype": residual_dtype,
                    "adapt_rank": adapt_rank,
                    "adapt_sync_every": adapt_sync_every,
                    "min_rank": min_rank,
                    "min_sync_every": min_sync_every,
                    "window": window,
                    "energy": energy,
                    "rank_rule": rank_rule,
                    "sync_rule": sync_rule,
                    "fragments": fragments,
                    "fragment_sync_delay": fragment_sync_delay,
                    "fragment_update_alpha": fragment_update_alpha,
                    "check_every": check_every,
                    "seed": seed,
                }
            )
            if adapt_sync_every and parts is None and any(map(_is_part, _parameters_of(optimizer))):
                raise ValueError(
                    "DiLoCoX: adapt_sync_every: expected cluster= (or a mesh of two dimensions) for shards, whose "
                    "averages differ, got none"
                )
            parameters = named_parameters(optimizer, model)
            buffers = named_buffers(model) if average_buffers and model is not None else []
        except Exception as mistake:
            if backend is not None:  # the other ranks wait in the same call, and raise this error too
                backend.agree_on_texts("DiLoCoX", [], error=f"{type(mistake).__name__}: {mistake}")
            raise
        self.inner = optimizer
        self._init_hooks()
        self._share_inner()
        self._outer = _C.DiLoCoX(parameters, backend, cluster=cluster_backend, buffers=buffers, options=options)
        self._parameters = self._identities()
        self._swapped = False
        if self._elastic is not None:
            if resume is not None:
                self._load(resume)
            self._elastic.form(self._outer)

    def _init_hooks(self) -> None:
        """Sets the attributes of torch's own optimizers that its schedulers and profilers need."""
        super().__init__([torch.zeros(())], {})

    def _share_inner(self) -> None:
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        self.defaults = self.inner.defaults

    def _identities(self) -> list[tuple[int, int, torch.dtype]]:
        """Returns (object, address of its elements, dtype) of every parameter: the outer loop reads and writes there."""
        return [(id(p), local(p).data_ptr(), p.dtype) for p in _parameters_of(self.inner)]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes an inner step, and the outer steps that are due after it.

        A step with a learning rate of 0 in every group does not count: torch makes such a step to give an optimizer its state
        before it loads a checkpoint. A step that a gradient scaler skips counts.

        Args:
            closure: For inner optimizers that take one.

        Returns:
            The result of the inner optimizer's step; None if a gradient scaler skips the step.

        Raises:
            ValueError: Parameters were added or removed, an average held NaN or infinity, or a rule returned something else
                than a number in its range.
            DistBackendError: A peer or the network failed, or ranks' outer parameters differ.
        """
        self._expect_own("step")
        loss = None
        if self._unscaled():
            loss = self.inner.step(closure) if closure is not None else self.inner.step()
        if self._identities() != self._parameters:
            raise ValueError(
                f"DiLoCoX: step: expected the {len(self._parameters)} parameters that it was made with, got "
                f"{len(self._identities())}, not all the same, of the same dtype and in the same place: make a new one where "
                "parameters come or go, or the model is moved or cast"
            )
        if any(group.get("lr", 1.0) != 0 for group in self.param_groups) and self._outer.step() and self._elastic:
            self._elastic.stepped()
        return loss

    # With this attribute a gradient scaler also calls step() for a step that it skips. Ranks that skip a step and ranks that
    # do not then have the same count of steps; else the last outer step would wait for ever.
    _step_supports_amp_scaling = True

    def _unscaled(self) -> bool:
        """Divides the gradients by the scaler's factor, if any; returns whether the inner step is to be made."""
        scale, infinities = getattr(self, "grad_scale", None), getattr(self, "found_inf", 0.0)
        if float(infinities) > 0:
            return False
        if scale is not None:
            inverse = scale.double().reciprocal().float().item()  # as the scaler computes it
            for parameter in _parameters_of(self.inner):
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls the inner optimizer's zero_grad."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises: the ranks have agreed on the parameters.

        Raises:
            ValueError: Always, after construction.
        """
        if not hasattr(self, "_outer"):
            return super().add_param_group(param_group)
        raise ValueError(
            "DiLoCoX: add_param_group: expected the parameters that it was made with, got more: add them to the inner "
            "optimizer first and make a new one"
        )

    def finish(self) -> None:
        """Ends training: waits for messages under way, makes the last outer step, and leaves its parameters in the model.

        Training since the last pseudo-gradient is lost. Collective.

        Raises:
            ValueError: It was called inside `outer_parameters()`, which puts the rank's own parameters back; or an average
                held NaN or infinity.
            DistBackendError: A peer or the network failed.
        """
        self._expect_own("finish")
        self._outer.finish()

    @property
    def steps(self) -> int:
        """Inner steps since the run began; a machine that came late has the others' count."""
        return self._outer.steps

    @property
    def regroup_due(self) -> bool:
        """Whether machines wait to be let in; all ranks have the same answer after the same outer step.

        False without a Membership.
        """
        return self._elastic is not None and self._elastic.due

    def regroup(self) -> None:
        """Goes on with the machines that are alive. Call it when `step` has raised a DistBackendError or `regroup_due` is true.

        Messages under way are dropped. Machines that are new or behind take outer parameters, momentum and counters from the
        most advanced machine, and go on from its outer parameters. The other machines keep what they have trained.

        Raises:
            ValueError: The group is not a Membership, or its machines run different options or models.
            TimeoutError: There were not enough machines in time.
            ConnectionError: The store is lost. The state is consistent: save it.
        """
        if self._elastic is None:
            raise ValueError("DiLoCoX: regroup: expected group= to be a Membership, got a process group")
        self._expect_own("regroup")
        self._elastic.form(self._outer)

    def restore(self) -> None:
        """Puts the outer parameters into the model, to start again from the last outer step, for example after an error.

        Raises:
            ValueError: It was called inside `outer_parameters()`, which puts the rank's own parameters back.
        """
        self._expect_own("restore")
        self._outer.restore()

    def _expect_own(self, what: str) -> None:
        if self._swapped:
            raise ValueError(f"DiLoCoX: {what}: expected the rank's own parameters, got one inside outer_parameters()")

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Inside this context the model has the outer parameters, equal on all ranks, for evaluation and for saving.

        Raises:
            ValueError: It was entered inside another `outer_parameters()`.
        """
        if self._swapped:
            raise ValueError("DiLoCoX: outer_parameters: expected to be outside of it, got one inside another")
        pairs = self._outer.swap_pairs()
        kept = [parameter.clone() for parameter, _ in pairs]
        with torch.no_grad():
            for parameter, outer in pairs:
                parameter.copy_(outer)
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            with torch.no_grad():
                for (parameter, _), own in zip(pairs, kept, strict=True):
                    parameter.copy_(own)

    @property
    def report(self) -> dict[str, Any]:
        """Figures of the last outer step.

        {"outer_steps" (begun so far, of all fragments), "participating" (ranks that are averaged), "alive" (ranks; with a
        Membership the machines that show a sign of life, in the group or not), "sync_every" (H_t, inner steps), "rank" (r_t,
        0 without factors), "effective_rank" (of the last average; 0 where nothing adapts to it), "sent_bytes" (by this rank
        for the step, with frame headers), "waited_s" (seconds that training waited for the average), "local_s" (seconds of
        computing on the training thread)}
        """
        report = self._outer.report
        report["alive"] = report["participating"] if self._elastic is None else self._elastic.alive()
        return report

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Returns the state that a run needs, in addition to its model, to go on with the same bits. Collective.

        It waits for messages under way and includes them. Save it with `torch.save` on each rank, or with
        `torch.distributed.checkpoint`: this object is a Stateful, and get_state_dict and set_state_dict take it, except with
        flatten_optimizer_state_dict. The model's own parameters differ between ranks: save them under a name for each rank.

        Returns:
            {"state": {}, "param_groups": [one group]}. With r for global ranks, the group has under "outer<r>" (r the first
            rank of the group) the tensors that are equal on all ranks of the group, and under "rank<r>" those of this rank.
            With a Membership these keys are "outer" and the machine's id. The rank's part has as bytes what a new object
            does not have in the same shapes: "inner", the inner optimizer's state, and "packed", low-rank factors.

        Raises:
            ValueError: An average under way held NaN or infinity.
            DistBackendError: A peer or the network failed. With a `cluster` also: the state of another rank of any stage
                failed; this rank is named and raises its own error, and training can go on.
        """
        try:
            inner = saved(self.inner.state_dict())
        except Exception as error:
            self._outer.state_failed(f"{type(error).__name__}: {error}")
            raise
        return packed(self._outer.state(), inner, shared=self._shared, own=self._own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Loads what `state_dict` returned. The model's own parameters are loaded with the model.

        Raises:
            ValueError: The state is of another model, number of ranks, mode or number of fragments; this rank's part is
                missing; or the group is a Membership (use `resume=`). Nothing has changed.
        """
        self._expect_own("load_state_dict")
        if self._elastic is not None:
            raise ValueError(
                "DiLoCoX: load_state_dict: expected a process group, got a Membership, whose machines have met: pass the "
                "state as resume= when making it"
            )
        self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        outer, inner = unpacked(state_dict, shared=self._shared, own=self._own)
        before = self.inner.state_dict()
        self.inner.load_state_dict(inner)
        try:
            self._outer.load(outer)
        except ValueError:
            self.inner.load_state_dict(before)
            raise
        finally:
            self._share_inner()

    def __repr__(self) -> str:
        report = self.report
        return f"DiLoCoX({self.inner!r}, sync_every={report['sync_every']}, outer_steps={report['outer_steps']})"


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_part(parameter: torch.Tensor) -> bool:
    return local(parameter).shape != parameter.shape
