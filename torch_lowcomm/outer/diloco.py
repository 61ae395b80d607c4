"""DiLoCoX: any optimizer, and an outer loop around it."""

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
    """An optimizer around an optimizer: ranks train by themselves and average what they moved by, every `sync_every` steps.

        opt = lc.DiLoCoX(torch.optim.AdamW(model.parameters(), lr=1e-3), sync_every=100, model=model)
        for batch in data:
            model(batch).backward()
            opt.step()
            opt.zero_grad()
        opt.finish()

    Every `sync_every` inner steps the pseudo-gradient, what training has moved the parameters by, is compressed, averaged
    over the group while training goes on, and taken as the gradient of an outer step, SGD with Nesterov momentum (DiLoCo,
    arXiv 2311.08105; overlapped and compressed: DiLoCoX, arXiv 2506.21263; in fragments: Streaming DiLoCo, arXiv
    2501.18512). The outer parameters, of which there is a float32 copy in host memory, end every outer step with the same
    bits on all ranks; the model's own differ between outer steps, and with a delay always: evaluate and save under
    `outer_parameters()`.

    It goes where the optimizer went: schedulers, clipping, gradient scalers and `state_dict` work on it. Parameters are
    of any kind: plain, under DDP, shards of FSDP2 or HSDP (each rank averages its own shards with the ranks that hold the
    same ones), the stage of a pipeline. All ranks of the group start with equal parameters.

    What goes wrong is thrown by the `step()` that meets it. Outer parameters, momentum, residuals and factors are then as
    after the last outer step, and what was under way is dropped; training can go on, or start from `restore()`.

    Collective over the group, and over `cluster`.

    Args:
        optimizer: The inner one, made already; any.
        sync_every: H, inner steps from one outer step to the next.
        mode: Where inner training goes on while an average is on its way, which then takes a whole interval: "continue"
            (the outer point plus what this rank has trained since), "restart" (the outer point), "eager" (an outer step of
            its own part at once); or "sync", which waits for it, as DiLoCo.
        model: Names the state's tensors, in checkpoints; None for numbers in the optimizer's order.
        group: Over whom to average, of backend lowcomm; None for the default group. Its ranks hold the same parameters, or
            the same shards or stage. A group of the loop's own is made of its ranks. Or a `Membership`: machines that come
            and go, of one process each (`regroup`); those who come take the model of those who are there.
        cluster: The ranks that hold the other shards or stages of this rank's model; needed where `adapt_sync_every`.
        mesh: In place of both: a DeviceMesh whose first dimension is the group and whose second, if any, the cluster.
        outer_lr: γ.
        outer_momentum: μ; None for 0.9 with mode "sync" and 0.6 with others.
        sync_warmup: So many first outer steps are as with mode "sync". DiLoCoX's paper gives no number; a tenth of all is
            our choice.
        codec: Codec text of the pseudo-gradients, e.g. "sym4:bucket=128", "gauss2"; None sends them in float32.
        rank: r, of low-rank factors in place of matrices (PowerSGD, arXiv 1905.13727), which are coded by `codec`; None:
            no factors. A matrix [size(0), the rest] whose factors would not be smaller is coded as it is.
        projection_codec: Codec text of each first factor, where it is not `codec`.
        error_feedback: Whether what compression loses is added to the next pseudo-gradient; None: with a codec, unless it
            is a "gauss", which loses little enough (residuals and their copy: 8 bytes an element, in host memory).
        residual_dtype: "float32", or "int8" for residuals of 1 byte an element between outer steps.
        adapt_rank: Let the rank follow the averages' effective rank (arXiv 2506.21263, section 2.4.3).
        adapt_sync_every: Let sync_every follow it, too: H·r_t/r.
        min_rank: The least rank.
        min_sync_every: The least interval.
        window: Outer steps that the rank is a mean over.
        energy: Share of the squared singular values that counts as the effective rank.
        rank_rule: In place of that mean: of the effective ranks of all outer steps so far, a number in [1, rank].
        sync_rule: In place of H·r_t/r: of r_t, the interval.
        fragments: Parts of the parameters, each with outer steps of its own, spread evenly over the interval.
        fragment_sync_delay: Inner steps from a fragment's pseudo-gradient to its outer step; None for a whole interval (or
            none with mode "sync").
        fragment_update_alpha: Mode "restart": the share of the rank's own parameters that an outer step leaves.
        average_buffers: Whether the model's floating-point buffers are averaged at every outer step, exactly; else they
            stay each rank's own.
        check_every: So many outer steps apart the ranks compare a checksum of the outer parameters; 0: never.
        seed: Of the first factors, and of codecs that round at random.

        resume: With a Membership: what `state_dict` gave on this machine, in a group of any size. Loaded before the machines
            meet, of whom the most advanced one's counts.

    Raises:
        TypeError: Something of another type.
        ValueError: An option or a parameter that will not do.
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
        self._groups: list[dist.ProcessGroup] = []  # of the loop's own
        backend = cluster_backend = None
        if not isinstance(over, Membership):
            group_made, backend = own_backend(over)
            # By what is unlike for other shards and stages, whose tensors may have the same names.
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
                raise ValueError("DiLoCoX: average_buffers: expected model= beside it, got none")
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
                    "DiLoCoX: adapt_sync_every: expected cluster= (or a mesh of two dimensions) beside shards, whose "
                    "averages differ, got none"
                )
            parameters = named_parameters(optimizer, model)
            buffers = named_buffers(model) if average_buffers and model is not None else []
        except Exception as mistake:
            if backend is not None:  # the others are in the same call, and get it as theirs
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
        """What torch's own optimizers have beside their groups, with which its schedulers and profilers work."""
        super().__init__([torch.zeros(())], {})

    def _share_inner(self) -> None:
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        self.defaults = self.inner.defaults

    def _identities(self) -> list[tuple[int, int, torch.dtype]]:
        """Of every parameter the object and where its elements are, which the outer loop reads and writes there."""
        return [(id(p), local(p).data_ptr(), p.dtype) for p in _parameters_of(self.inner)]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """An inner step, and the outer steps that are due after it.

        A step with a learning rate of 0 in every group is no inner step: checkpoints are loaded into optimizers that have
        no state yet by such a one.

        Args:
            closure: For inner optimizers that take one.

        Returns:
            What the inner optimizer's step returns; None of a step that a gradient scaler skips, which counts.

        Raises:
            ValueError: Parameters were added or removed; an average held NaN or infinity; a rule gave something else.
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

    # A gradient scaler calls step() for a step that it skips, too, and leaves it to that: ranks that skip one and ranks
    # that do not stay at the same count of steps, or the last outer step would wait for ever.
    _step_supports_amp_scaling = True

    def _unscaled(self) -> bool:
        """Whether the inner step is to be made, by gradients that are as without a scaler."""
        scale, infinities = getattr(self, "grad_scale", None), getattr(self, "found_inf", 0.0)
        if float(infinities) > 0:
            return False
        if scale is not None:
            inverse = scale.double().reciprocal().float().item()  # as the scaler's own
            for parameter in _parameters_of(self.inner):
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the ranks have agreed on the parameters.

        Raises:
            ValueError: Always, once made.
        """
        if not hasattr(self, "_outer"):
            return super().add_param_group(param_group)
        raise ValueError(
            "DiLoCoX: add_param_group: expected the parameters that it was made with, got more: add them to the inner "
            "optimizer first and make a new one"
        )

    def finish(self) -> None:
        """Ends training: waits for what is under way, takes the last outer step, and leaves the outer parameters in the model.

        What was trained since the last pseudo-gradient is given up. Collective.

        Raises:
            ValueError: Inside `outer_parameters()`, which puts the rank's own back; an average held NaN or infinity.
            DistBackendError: A peer or the network failed.
        """
        self._expect_own("finish")
        self._outer.finish()

    @property
    def steps(self) -> int:
        """Inner steps since the run began; of a machine that came late, the others'."""
        return self._outer.steps

    @property
    def regroup_due(self) -> bool:
        """Whether machines wait to be let in: the same answer on all, after the same outer step. False without a Membership."""
        return self._elastic is not None and self._elastic.due

    def regroup(self) -> None:
        """Goes on with the machines that are alive, after `step` has thrown a DistBackendError or where `regroup_due`.

        What is under way is dropped. Machines that lag behind, or are new, take outer parameters, momentum and counters from
        the most advanced one, and go on from its outer parameters; the others keep what they have trained.

        Raises:
            ValueError: The group is no Membership, or its machines run other options or another model.
            TimeoutError: There were not enough machines in time.
            ConnectionError: The store is lost. The state is whole: save it.
        """
        if self._elastic is None:
            raise ValueError("DiLoCoX: regroup: expected group= to be a Membership, got a process group")
        self._expect_own("regroup")
        self._elastic.form(self._outer)

    def restore(self) -> None:
        """Puts the outer parameters in the model: a start from the last outer step, after an error say.

        Raises:
            ValueError: Inside `outer_parameters()`, which puts the rank's own back.
        """
        self._expect_own("restore")
        self._outer.restore()

    def _expect_own(self, what: str) -> None:
        if self._swapped:
            raise ValueError(f"DiLoCoX: {what}: expected the rank's own parameters, got one inside outer_parameters()")

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """The model has the outer parameters inside, equal on all ranks, for evaluation and for saving it."""
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
        """Of the last outer step.

        {"outer_steps" (begun so far, of all fragments), "participating" (ranks that are averaged), "alive" (ranks, or with
        a Membership machines, in the group or not), "sync_every" (H_t), "rank" (r_t, 0 without factors), "effective_rank"
        (of the last average; 0 where nothing adapts to it), "sent_bytes" (by this rank for it, frame headers included),
        "waited_s" (for it to come: what of its way training did not hide), "local_s" (computing on the training thread)}
        """
        report = self._outer.report
        report["alive"] = report["participating"] if self._elastic is None else self._elastic.alive()
        return report

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """What a run needs beside its model to go on with the same bits, messages under way included.

        Collective: it waits for them. For `torch.save` a rank, or `torch.distributed.checkpoint`, of which this object is a
        Stateful, and whose get_state_dict and set_state_dict take it, but flatten_optimizer_state_dict. The model's own
        parameters differ between ranks: save them under names of the rank's own.

        In the only one of "param_groups", what all ranks of the group have alike is under "outer<r>", r the first of them,
        what is this rank's under "rank<r>", both global ranks; with a Membership under "outer" and the machine's id. In the
        rank's part are as bytes what a fresh object does not have in the same shapes: "inner", the inner optimizer's state,
        and "packed", low-rank factors.

        Raises:
            ValueError: An average under way held NaN or infinity.
            DistBackendError: A peer or the network failed. With a `cluster`: or the state of another rank of any stage, which
                is named, and which throws its own error; training can go on.
        """
        try:
            inner = saved(self.inner.state_dict())
        except Exception as error:
            self._outer.state_failed(f"{type(error).__name__}: {error}")
            raise
        return packed(self._outer.state(), inner, shared=self._shared, own=self._own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Takes what `state_dict` gave. The model's own parameters are loaded with the model.

        Raises:
            ValueError: Another model's, another number of ranks, mode or fragments, or this rank's part is missing; the
                group is a Membership (`resume=`). Nothing has changed.
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
