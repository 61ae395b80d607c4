"""DiLoCoX: an outer loop around any optimizer."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_lowcomm import _C
from torch_lowcomm._ddp_around import without_ddp
from torch_lowcomm._reshard import reshard
from torch_lowcomm.diloco.checkpoint import LoopState
from torch_lowcomm.diloco.elastic import Elastic, Fixed
from torch_lowcomm.diloco.groups import LoopGroups
from torch_lowcomm.diloco.inner_optimizer import OptimizerAround
from torch_lowcomm.diloco.model_parameters import ModelParameters
from torch_lowcomm.diloco.options import DiLoCoXOptions
from torch_lowcomm.diloco.parameters import LoopInputs
from torch_lowcomm.membership import Membership


class DiLoCoX(OptimizerAround):
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
    Streaming DiLoCo, arXiv 2501.18512). The outer parameters are a float32 copy in host memory and end every outer step with
    the same bits on all ranks. The model's own parameters differ between outer steps, and with a delay always: evaluate and
    save under `outer_parameters()`.

    Use a DiLoCoX in place of the optimizer: schedulers, clipping, gradient scalers and `state_dict` work on it.

    A site is one rank, or several ranks that hold one model together: replicas under DDP, shards of FSDP2 or HSDP, stages of a
    pipeline. They share the outer step: each averages about an equal part of the parameters with one rank of every other
    site, keeps outer parameters, momentum and residuals of that part alone, and the ranks exchange the results inside the
    site, exactly. So a site sends one message, with the bits and the bytes of a site of one rank, whatever number of
    replicas it has. The ranks of a site are those of `cluster` or `mesh`, or else those that DDP around the parameters or
    DTensors name. All ranks of all sites start with equal parameters.

    The next `step()` raises an error that occurred meanwhile. Outer parameters, momentum, residuals and factors are then as
    after the last outer step, and messages under way are dropped. Training can go on, or start from `restore()`.

    Collective over the group and over the site, and so are all methods that wait.

    Args:
        optimizer: The inner optimizer, of any kind.
        sync_every: H, inner steps from one outer step to the next. It is needed: None is refused on all ranks.
        model: Names the tensors in checkpoints; None for numbers in the optimizer's order. Where FSDP2 shards it the whole model,
            its root: that keeps gathered weights after an evaluation, which are dropped where parameters are written.
        group: The group to average over, of backend lowcomm; None for the default group. It has the ranks at one place of every
            site, and sites have their ranks in the same order. The loop makes a separate group of these ranks. Or a
            `Membership` of sites that come and go (`regroup`); a site that comes takes the others' model, whatever number of
            ranks shards it there.
        cluster: A process group of all ranks of this rank's site, of any backend. Needed for a pipeline whose stages adapt their
            interval together (`adapt_sync_every`); a Membership with `site=` has it.
        mesh: In place of group and cluster: a DeviceMesh whose first dimension goes along sites. All other dimensions are the
            site; the dimension named "replicas", "replicate" or "dp_replicate" goes along ranks that hold the same.
        replicas: A process group of the ranks of the site that hold what this rank holds, where neither DDP nor a DTensor nor the
            mesh says so.
        resume: With a Membership: what `state_dict` returned on this machine, in a group of any size; on each rank of a site
            its own, at a site of the same ranks. It is loaded before the machines meet; the state of the most advanced one
            counts.
        **options: Fields of `DiLoCoXOptions` (`torch_lowcomm.diloco`), which has their defaults and meanings: mode, outer_lr,
            codec, rank, fragments and others.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An option or a parameter is wrong.
        DistBackendError: Ranks have different options, parameters or values (the first is named), another rank raised, or a
            peer failed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sync_every: int | None = None,
        *,
        model: nn.Module | None = None,
        group: dist.ProcessGroup | Membership | None = None,
        cluster: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        replicas: dist.ProcessGroup | None = None,
        resume: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        reshard(model)
        self._groups = groups = LoopGroups.make(
            group=group, cluster=cluster, mesh=mesh, replicas=replicas, model=model, optimizer=optimizer
        )
        model = without_ddp(model)
        try:
            inputs = LoopInputs.checked(optimizer, model, {"sync_every": sync_every, **options}, groups.site_ranks)
            for name, given in (("resume", resume), ("quorum", inputs.options.quorum)):
                if given is not None and groups.members is None:
                    raise ValueError(f"DiLoCoX: {name}: expected group= to be a Membership, got a process group")
        except Exception as mistake:
            # The other ranks wait in the same call, and raise this error too.
            _C.refuse_diloco(f"{type(mistake).__name__}: {mistake}", **groups.for_core)
            raise
        super().__init__(optimizer)
        self._outer = _C.DiLoCoX(inputs.parameters, buffers=inputs.buffers, options=inputs.for_core, **groups.for_core)
        self._parameters = ModelParameters(optimizer, [buffer for _, buffer, _, _ in inputs.buffers], model)
        self._state = LoopState(self._outer, groups, by_clock=inputs.options.sync_seconds is not None)
        self._members = Fixed()
        if groups.members is not None:
            self._state.resume(self, resume, groups.members)
            self._members = Elastic(groups.members, self._outer, inputs.options)
            self.regroup()

    def step(self, closure: Callable[[], Any] | None = None, *, samples: float = 1) -> Any:  # type: ignore[override]
        """Makes an inner step, and the outer steps that are due after it.

        Every call counts, also with a learning rate of 0 and where a gradient scaler skips the step.

        Args:
            closure: For inner optimizers that take one.
            samples: Samples that this rank's site has trained on in this step, for `sync_seconds` and `quorum`; all ranks give
                the same. 1: sites count by their steps.

        Returns:
            The result of the inner optimizer's step; None if a gradient scaler skips the step.

        Raises:
            ValueError: Parameters were added or removed, or an average held NaN or infinity.
            DistBackendError: A peer or the network failed, or ranks' outer parameters differ.
        """
        self._parameters.expect_own("step")
        result = self._inner_step(closure)
        self._parameters.expect_in_place()
        self._members.step(self._outer, samples)
        return result

    def finish(self) -> None:
        """Ends training: waits for messages under way, makes the last outer step, and leaves its parameters in the model.

        Training since the last pseudo-gradient is lost. Collective.

        Raises:
            ValueError: It was called inside `outer_parameters()`, or an average held NaN or infinity.
            DistBackendError: A peer or the network failed. With a Membership: `regroup()`, train on if `report["outer_steps"]`
                has gone back, and end again; if `regroup()` raises TimeoutError, too few are left (others may have ended),
                and `restore()` puts the outer parameters into the model.
        """
        with self._parameters.written("finish"):
            self._members.finish(self._outer)

    @property
    def steps(self) -> int:
        """Inner steps since the run began; a machine that came late has the others' count."""
        return self._outer.steps

    @property
    def regroup_due(self) -> bool:
        """Whether machines wait to be let in; all ranks have the same answer after the same outer step.

        False without a Membership.
        """
        return self._members.due

    def regroup(self) -> None:
        """Goes on with the machines that are alive. Call it when `step` has raised a DistBackendError or `regroup_due` is true.

        Messages under way are dropped. Machines that are new or behind take outer parameters, momentum and counters from the
        most advanced machines, and go on from their outer parameters; with a quorum by what they have trained. The others keep
        what they have trained, and go on training while they give. Those that take leave out about as many inner steps as were
        made meanwhile; `steps` counts them.

        Raises:
            ValueError: The group is not a Membership, or its machines run different options or models.
            TimeoutError: There were not enough machines in time, or one of the last group is alive and neither came nor trained.
            ConnectionError: The store is lost or too slow. The outer state is whole: save it.
            DistBackendError: A rank of this site was lost, or no group held in ten attempts.
        """
        with self._parameters.written("regroup"):
            self._members.form(self._outer)

    def restore(self) -> None:
        """Puts the outer parameters into the model, to start again from the last outer step, for example after an error.

        Collective over the site, not over the sites.
        """
        with self._parameters.written("restore"):
            self._outer.restore()

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Inside this context the model has the outer parameters, equal on all ranks, for evaluation and for saving.

        Collective over the site, not over the sites. It puts the rank's own parameters back, and so methods that write
        parameters, another `outer_parameters()` included, raise ValueError inside it.
        """
        with self._parameters.replaced(self._outer.show_outer):
            yield

    @property
    def report(self) -> dict[str, Any]:
        """Figures of the last outer step.

        {"outer_steps" (begun so far, of all fragments), "participating" (ranks that are averaged), "alive" (ranks; with a
        Membership the machines that show a sign of life, in the group or not), "sync_every" (H_t, inner steps), "rank" (r_t, 0
        without factors), "effective_rank" (by the last average; 0 where nothing adapts to it), "sent_bytes" (by this rank for
        the average that came last, with frame headers), "waited_s" (seconds that training waited for it), "total_sent_bytes"
        and "total_waited_s" (for all averages that came to this object, in groups that have ended too), "local_s" (seconds of
        computing on the training thread), "stripe_elements" (elements of each stripe into which this rank's part of the model
        is divided; their sum is the model or the stage), "stripes" (numbers of those that this rank averages), "taken_bytes"
        and "taken_s" (outer state that this rank took from other sites when it last joined a group, and the seconds that this
        lasted), "late" (with a quorum: ids of the machines that the others went on without, and that are not back),
        "late_samples" (a sum: of this site, that it had trained when it was late, and that counted later), "dropped_samples" (a
        sum: of this site, in parameters that gave way to others' when it joined a group), "memory" (bytes of this rank's outer
        state when the last average had come, which is when there is most: "outer", "momentum", "start", "mark", "average",
        "residual", "rounding" and their "total"; docs/diloco_memory.md says what they are)}
        """
        return self._members.completed(self._outer.report)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Returns the state that a run needs, in addition to its model, to go on with the same bits. Collective.

        It waits for messages under way and includes them. Sites call it after the same outer step. Save it with `torch.save` on
        each rank, or with `torch.distributed.checkpoint`: this object is a Stateful, and get_state_dict and set_state_dict take
        it, except with flatten_optimizer_state_dict. The model's own parameters differ between ranks: save them under a name
        for each rank.

        Returns:
            {"state": {}, "param_groups": [one group]}. With r for global ranks, the group has under "outer<r>" (r the first
            rank of the group) the tensors that are equal on all ranks of the group, and under "rank<r>" those of this rank.
            With a Membership these keys are "outer" and the machine's id. The rank's part has as bytes what a new object
            does not have in the same shapes: "inner", the inner optimizer's state, and "packed", low-rank factors.

        Raises:
            ValueError: An average under way held NaN or infinity.
            DistBackendError: A peer or the network failed. With a `cluster` also: the state of another rank of any stage
                failed; this rank is named and raises its own error, and training can go on. With a Membership that has lost a
                machine or site the state of this step is lost, though others may have theirs: go on as after `step`, and save
                after a later outer step.
        """
        return self._state.packed(self.inner)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Loads what `state_dict` returned. The model's own parameters are loaded with the model.

        Raises:
            ValueError: The state is of another model, number of ranks, mode or number of fragments; this rank's part is
                missing; the state is damaged or was changed, by its checksum; or the group is a Membership (use `resume=`).
                Nothing has changed.
        """
        self._parameters.expect_own("load_state_dict")
        if self._groups.members is not None:
            raise ValueError(
                "DiLoCoX: load_state_dict: expected a process group, got a Membership, whose machines have met: pass the "
                "state as resume= when making it"
            )
        self._state.load(self, state_dict)

    def __repr__(self) -> str:
        report = self.report
        return f"DiLoCoX({self.inner!r}, sync_every={report['sync_every']}, outer_steps={report['outer_steps']})"


DiLoCoX.__signature__ = DiLoCoXOptions.completed(inspect.signature(DiLoCoX))  # type: ignore[attr-defined]
