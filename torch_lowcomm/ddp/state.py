"""The state of the DDP hook: its options, the compression of each parameter, and its checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from torch_lowcomm import _C
from torch_lowcomm._checksum import checksum, expect_checksum
from torch_lowcomm._ddp_around import without_ddp
from torch_lowcomm._hosts import AUTO, FLAT, hosts_of
from torch_lowcomm._log import logger
from torch_lowcomm.ddp.parameters import Entry, Named, Parameters, StateOptions
from torch_lowcomm.ddp.step import Step, Way
from torch_lowcomm.groups import backend_of


class _Connection(NamedTuple):
    """What a state has of its group, once all ranks have given the same options."""

    backend: _C.LowcommBackend  # of the model's group
    way: Way
    coding: _C.LowcommBackend  # of the coded ops
    parameters: Parameters


class State:
    """How the gradients of one DDP model are sent, and what compression has lost of them so far.

        model.register_comm_hook(lc.ddp.State(codec="sym4"), lc.ddp.hook)            # 4 bits an element
        model.register_comm_hook(lc.ddp.State(codec="sym4:bucket=128", rank=4), lc.ddp.hook)

    A bucket sends its gradients in one coded message, and in a second, exact message those of norms, biases, every parameter
    with less than 2 dimensions or 1024 elements, and the parameters that `exact` names. With `rank` the matrix
    [size(0), the rest] of a parameter is sent as two factors of that rank, coded too (PowerSGD, arXiv 1905.13727; coded
    factors: DiLoCoX, arXiv 2506.21263), unless these would not be smaller: in two coded messages, of which the second depends
    on the first. All ranks end with the same bits, on any CPU.

    Error feedback: a rank keeps what coding and low rank lose of its gradient, including the second encoding of the sum, and
    adds it to its next gradient: over all ranks and steps the sum of the gradients is that of the applied gradients and of the
    residuals. A gradient that is 0 everywhere on a rank (an unused parameter) sends nothing from this rank, and its residual
    stays. Residuals and factors are keyed by parameter: they survive when DDP rebuilds its buckets, and a parameter's result
    does not depend on its bucket.

    A step changes all of the state or none. Where any gradient of any rank has a NaN or an infinity, every rank gets NaN or
    infinities there (with `rank`, in all gradients of the bucket that are sent as factors, over hosts by the same rank).

    Where every host has several ranks, one coded copy a host crosses its link: gradients are averaged exactly inside a host, each
    of its ranks sends a share of the average to the ranks at its place of the other hosts (a matrix with factors as a whole),
    and has the residuals of this share.

    If the group has a policy for all_reduce, the hook takes precedence. Collective: ranks compare their options here. Where
    there is no group yet (Lightning's `ddp_comm_state`), they do so at the first step. Each model needs a separate State.

    `torch.save`, pickle and deepcopy of a DDP model copy its State too: with the steps, the factors and this rank's residuals,
    for the default group of the process that loads it, on the same hosts. Residuals of other ranks begin at 0. All ranks load a
    copy, or none.

    Args:
        process_group: The group of the DDP model, of backend lowcomm; None for the default group.
        codec: Codec text of coded gradients: "sym4:bucket=128", "gauss4:gain=1.011", "qsgd8"…. Not by channel.
        rank: Rank of the factors, 1 or more; None for no factors.
        projection_codec: Codec text of each matrix's first factor, P; None for `codec`. No residual returns to P what its
            codes lose: use 8 bits here.
        error_feedback: Whether residuals are kept (8 bytes a coded element, in host memory).
        warm_up_steps: Number of first steps that are exact.
        residual_dtype: "float32", or "int8" for 8 bits an element and a scale every 512 elements (LoCo, arXiv 2407.04480),
            which takes 2 bytes an element in place of 8; it loses what 8 bits cannot hold.
        model: The model or its DDP wrapper: residuals are then keyed by parameter name. Without it they are keyed by the order
            of the first backward's buckets, which the same model and bucket_cap_mb make again.
        exact: Called with (name, parameter) for the parameters of `model`; True keeps a parameter exact.
        grad_scaler: The `torch.amp.GradScaler` in use: residuals follow its scale. Without it, each change of the scale adds
            residuals of the old scale once to gradients of the new one.
        hosts: "auto": ranks of one network namespace of one machine share a host; "flat": each rank sends for itself; or a
            DeviceMesh [hosts, ranks of a host] of the group's ranks.

    Raises:
        ValueError: A group, codec or number is wrong, or `exact` was given without `model`.
        TypeError: `exact` is not a function, or `hosts` of another type.
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
        hosts: DeviceMesh | str = AUTO,
    ) -> None:
        self._group, self._scaler = process_group, grad_scaler
        self._hosts: DeviceMesh | str | list[list[int]] = hosts
        self._start()
        connected = process_group is not None or dist.is_initialized()
        backend = backend_of(process_group) if connected else None
        try:
            self._options = StateOptions(
                codec, projection_codec, rank, error_feedback, residual_dtype, warm_up_steps
            ).checked()
            self._named, self._fixed = _named(model, exact), model is not None
        except Exception as error:
            if backend is not None:
                _refuse(backend, error)
            raise
        if backend is not None:
            self._connect(backend)

    def _start(self) -> None:
        """Sets what a State begins with, before it has a group."""
        self._connected: _Connection | None = None
        self._copied: tuple[Any, dict[str, Any]] | None = None  # Way.rows and tensors
        self._step: Step | None = None
        self._steps, self._scale = 0, 1.0
        self._sparse: set[str] = set()
        self._said = False

    def _connect(self, backend: _C.LowcommBackend) -> None:
        """Compares this rank's options with the others'. Collective; the State has a group where all are the same."""
        try:
            table = hosts_of("ddp.State", backend, self._hosts)
        except Exception as error:
            _refuse(backend, error)
            raise
        own = {"grad_scaler": self._scaler is not None, "steps": self._steps, "hosts": _text(table)}
        _agree(backend, {**dataclasses.asdict(self._options), **own})
        way = Way.over(self._group if self._group is not None else dist.group.WORLD, table, backend.options.timeout)
        coding = backend_of(way.coding)
        try:
            parameters = Parameters(
                coding, self._options, self._named, fixed=self._fixed, rank=backend.rank(), levels=way.levels
            )
            if self._copied is not None:
                rows, tensors = self._copied
                if rows != way.rows:
                    raise ValueError(f"ddp.State: expected a copy from the same hosts, {way.rows}, got one from {rows}")
                parameters.load_own(tensors)
        except Exception as error:
            _refuse(backend, error)
            raise
        _agree(backend, {"coded parameters": parameters.coded()})
        if any(part.strip().startswith("all_reduce=") for part in backend.policy.split(";")):
            logger.info(
                "ddp: group %s has the policy %r, and the hook wins: gradients are coded once, by %s",
                backend.group_name,
                backend.policy,
                self._options.codec,
            )
        self._connected, self._copied = _Connection(backend, way, coding, parameters), None

    def _on_group(self) -> _Connection:
        """The backend and the parameters. Collective at the first call, where there was no group before."""
        if self._connected is None:
            self._connect(backend_of(self._group))
        assert self._connected is not None
        return self._connected

    @property
    def steps(self) -> int:
        """Number of steps that have begun."""
        return self._steps

    def reduce(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Starts to average a bucket, for `lc.ddp.hook`, in the buckets' order. The future is of the bucket's buffer; that of
        the last bucket ends when the step's residuals have their new values.
        """
        if bucket.index() == 0:
            self._begin()
        step = self._step
        if step is None:
            raise ValueError(f"ddp: expected a step's bucket 0 first, got bucket {bucket.index()}")
        entries = [self._on_group().parameters.of(parameter) for parameter in bucket.parameters()]
        exact = step.number < self._options.warm_up_steps or _C.in_exact()
        if bucket.buffer().is_sparse:
            self._sparse |= {entry.key for entry in entries}
            exact = True
        future = step.reduce(bucket, None if exact else entries)
        if bucket.is_last() and not self._said:
            self._said = True
            _say(self._options, list(self._on_group().parameters), self._sparse)
        return future

    def _begin(self) -> None:
        if self._step is not None:
            self._step.roll_back()  # does nothing unless a backward pass broke off
        connection = self._on_group()
        self._follow_scale()
        self._step = Step(self._steps, connection.way, connection.coding, self._options)
        self._steps += 1

    def _follow_scale(self) -> None:
        """Scales the residuals, which are in the gradients' unit, as the scaler did (exactly, if by powers of two)."""
        scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        if scale != self._scale and self._steps > 0:
            for entry in self._on_group().parameters:
                if entry.compression is not None:
                    entry.compression.scale(scale / self._scale)
        self._scale = scale

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on bit for bit: this rank's residuals, the factors, the number of steps.

        Save one on each rank: by `torch.save`, or by `torch.distributed.checkpoint` if `model=` was given. With more than two
        ranks the order of an exact sum depends on the bucket, as in DDP without a hook, and a run's first step has other
        buckets than later steps: there "bit for bit" holds for coded gradients only.

        Returns:
            {"world_size", "hosts", "steps", "grad_scale", "rank", "error_feedback", "residual_dtype",
            "rank<r>.<parameter>.residual": float32 of the parameter's shape or of this rank's share, or the bytes of 8 bits,
            "<parameter>.factor": float32 [rank, columns], "rank<r>.crc"}. The tensors are the state's own: do not write to them.
        """
        backend, way, _, parameters = self._on_group()
        state = {
            "world_size": backend.size(),
            "hosts": way.rows,
            "steps": self._steps,
            "grad_scale": self._scale,
            **self._options.of_state(),
            **parameters.state_dict(),
        }
        return {**state, f"rank{backend.rank()}.crc": checksum(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned on this rank. Call it between steps.

        Raises:
            ValueError: The state is of another world size or other hosts (residuals are not redistributed), of another rank of
                the group or kind, does not fit a parameter, or is damaged or was changed, by its checksum. Nothing has changed.
                A parameter that is not known yet raises it when it comes.
        """
        backend, way, _, parameters = self._on_group()
        fixed = {"world_size": backend.size(), "hosts": way.rows, **self._options.of_state()}
        for name, value in fixed.items():
            if state.get(name, "none") != value:
                raise ValueError(f"ddp: load_state_dict: {name}: expected {value}, got {state.get(name, 'none')}")
        if self._step is not None:
            self._step.roll_back()  # does nothing unless a backward pass broke off
        crc = f"rank{backend.rank()}.crc"
        fields = {"steps", "grad_scale", *fixed, crc}
        tensors = {name: value for name, value in state.items() if name not in fields}
        parameters.check(tensors)
        expect_checksum("ddp", {name: value for name, value in state.items() if name != crc}, state.get(crc))
        parameters.load(tensors)
        self._steps = int(state["steps"])
        self._scale = float(state["grad_scale"])

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: all but the group. Call them between steps."""
        named, copied, hosts = self._named, self._copied, self._hosts
        if self._connected is not None:
            rows, parameters = self._connected.way.rows, self._connected.parameters
            named, copied = parameters.named(), (rows, parameters.state_dict())
            hosts = hosts if isinstance(hosts, str) else rows  # a mesh is of this process
        return {
            "options": self._options,
            "hosts": hosts,
            "scaler": self._scaler,
            "steps": self._steps,
            "scale": self._scale,
            "named": named,
            "fixed": self._fixed,
            "copied": copied,
        }

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self._start()
        self._group, self._options, self._scaler = None, kept["options"], kept["scaler"]
        self._hosts = kept["hosts"]
        self._named, self._fixed, self._copied = kept["named"], kept["fixed"], kept["copied"]
        self._steps, self._scale = kept["steps"], kept["scale"]


def _say(options: StateOptions, entries: list[Entry], sparse: set[str]) -> None:
    """Logs how the parameters travel."""
    coded = [entry for entry in entries if entry.rank is not None and entry.key not in sparse]
    factors = sum(entry.rank != 0 for entry in coded)
    logger.info(
        "ddp: %d parameters (%d elements) travel by %s%s; %d exact%s",
        len(coded),
        sum(entry.parameter.numel() for entry in coded),
        options.codec,
        f", {factors} of them as factors of rank {options.rank}" if options.rank else "",
        len(entries) - len(coded),
        f", for their gradients are sparse: {', '.join(sorted(sparse))}" if sparse else "",
    )


def _text(table: torch.Tensor | None) -> str:
    return FLAT if table is None else str(table.tolist())


def _agree(backend: _C.LowcommBackend, texts: dict[str, Any]) -> None:
    backend.agree_on_texts("ddp.State", [(name, str(value)) for name, value in texts.items()])


def _refuse(backend: _C.LowcommBackend, error: Exception) -> None:
    """Tells the other ranks, which wait to compare options, of an error of this one."""
    backend.agree_on_texts("ddp.State", [], error=f"{type(error).__name__}: {error}")


def _named(model: nn.Module | None, exact: Callable[[str, nn.Parameter], bool] | None) -> list[Named]:
    """The trained parameters of a model, with what `exact` says of each; none without a model."""
    if exact is not None and not callable(exact):
        raise TypeError(f"ddp.State: exact: expected a function of (name, parameter), got {type(exact).__name__}")
    if model is None:
        if exact is not None:
            raise ValueError("ddp.State: exact: expected model= too, whose names it is called with, got none")
        return []
    inner = without_ddp(model)
    trained = ((name, parameter) for name, parameter in inner.named_parameters() if parameter.requires_grad)
    return [(name, parameter, exact is not None and exact(name, parameter)) for name, parameter in trained]
