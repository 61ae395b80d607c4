"""QuantizedAdam: Adam whose ranks exchange their momentum in few bits, in place of DDP and its optimizer."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_lowcomm import _C
from torch_lowcomm._adam_groups import expect_in_range, expect_usable, inverse_of, loading, rules_of
from torch_lowcomm._adam_shares import AdamShares
from torch_lowcomm._adam_warm_up import WarmUp
from torch_lowcomm._checksum import checksum, expect_checksum
from torch_lowcomm._copies import NotCopied
from torch_lowcomm._ddp_around import ranks_of_ddp
from torch_lowcomm._host_levels import HostLevels
from torch_lowcomm._hosts import AUTO, hosts_of
from torch_lowcomm._option_table import expect_integer
from torch_lowcomm.codec import codec as checked_codec
from torch_lowcomm.diloco.parameters import local
from torch_lowcomm.groups import backend_of

_MOMENTS = ("exp_avg", "exp_avg_sq", "rounding")


class QuantizedAdam(NotCopied, torch.optim.Optimizer):
    """AdamW of a group of ranks, each with data of its own: `step` does the communication, and there is no DDP around the model.

        opt = lc.QuantizedAdam(model.parameters(), lr=1e-3, warmup_steps=100)
        for batch in data:
            model(batch).backward()
            opt.step()
            opt.zero_grad()

    QuantizedAdam of AQ-SGD (Wang et al., NeurIPS 2022, section 4.3), which is 1-bit Adam (Tang et al., arXiv 2102.02888) with
    more bits. In the first `warmup_steps` the ranks average their gradients exactly, and make AdamW's steps. From then on the
    second moment v stays as it is, and each rank adds its own gradient to the common momentum: m_i = β1·m + (1−β1)·g_i. The
    codes of m_i / (√v̂ + eps) are averaged; the average is the step's direction, and gives the next common momentum. What the
    codes lose of a rank's part, and of the sum that this rank makes for its slice, is added to what it sends in the next step.

    All ranks start with equal parameters, and end every step with the same bits in parameters and moments. Parameters of other
    types than float32 are rounded at every step; what rounding took from them is kept in float32 for the next step.

    Of a DTensor (FSDP2) each rank averages its own shard: `group` has the ranks that hold the same shard of other replicas, and
    the moments are DTensors too.

    Where every host has several ranks, one coded copy a host crosses its link: gradients are averaged exactly inside a host, and
    each of its ranks makes the steps of a share of the parameters with the ranks at its place of the other hosts. Its moments
    and residuals are of this share alone. The constructor is then collective.

    A parameter without a gradient counts as one with zeros. Clipping acts on a rank's own gradients. A gradient scaler works: a
    step whose gradients are not finite on any rank is skipped on all.

    Collective in `step`: at the first one, after `add_param_group` and `load_state_dict`, and every `check_every` steps ranks
    compare their options, parameters, moments and learning rates, before they send anything else.

    Args:
        params: Parameters, named parameters or parameter groups; those that require gradients are trained.
        lr: Learning rate.
        betas: β1 and β2.
        eps: Is added to the denominator.
        weight_decay: Decoupled, as AdamW's: θ ← θ − lr·weight_decay·θ.
        codec: Codec text of what travels after the warm-up. "gauss4" loses a fifth less of a step than "sym4:bucket=512", the
            paper's.
        warmup_steps: Exact steps; a fifth of all is a good choice, and so many that v has settled. v must be a mean of 3
            squared gradients or more, which fewer steps or a small β2 do not make. Later gradients that are 10 times as
            large as those of the warm-up are warned of: v stays as it was.
        check_every: Steps between comparisons; 0: only where something may have changed.
        seed: Of codecs that round at random.
        group: The ranks that hold the same parameters, of backend lowcomm; None for the default group.
        hosts: "auto": ranks of one network namespace of one machine share a host; "flat": each rank sends for itself; or a
            DeviceMesh [hosts, ranks of a host] of the group's ranks.

    Raises:
        TypeError: A parameter is no dense floating-point tensor, or an option has another type.
        ValueError: A number, the codec or the group is wrong. The other ranks raise it as DistBackendError at their first step.
    """

    # With this attribute a gradient scaler also calls step() where a gradient of this rank is not finite: the other ranks wait.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        codec: str = "gauss4",
        warmup_steps: int = 100,
        check_every: int = 100,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        hosts: DeviceMesh | str = AUTO,
    ) -> None:
        self._backend = backend = backend_of(group)
        self._trained: list[torch.Tensor] = []
        self._shares: AdamShares | None = None
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.steps_with = set(ranks) - {dist.get_rank()}  # DiLoCoX does not take them for sites
        self._warm_up = WarmUp(warmup_steps)
        self._names: dict[int, str] = {}  # by a parameter's id
        self._began = False
        try:
            for name, number in {"warmup_steps": warmup_steps, "check_every": check_every, "seed": seed}.items():
                expect_integer(f"QuantizedAdam: {name}", number)
            if seed < 0:
                raise ValueError(f"QuantizedAdam: seed: expected 0 or more, got {seed}")
            params = list(params)
            table = hosts_of("QuantizedAdam", backend, hosts)
            if table is not None:
                backend.agree_on_texts("QuantizedAdam", [("hosts", str(table.tolist()))])
                levels = HostLevels(table, backend.options.timeout)
                self._shares = AdamShares(levels)
            self._core = _C.QuantizedAdam(
                backend if table is None else backend_of(levels.between),
                codec=checked_codec(codec).spec,
                warmup_steps=warmup_steps,
                check_every=check_every,
                seed=seed,
            )
            super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
            self._expect_no_ddp()
        except Exception as mistake:  # the other ranks hear of it in their first step
            backend.agree_on_texts("QuantizedAdam", [], error=f"{type(mistake).__name__}: {mistake}")
            raise

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, whose warm-up begins with the next step. All ranks add the same ones at the same step.

        Raises:
            TypeError: A parameter is no dense floating-point tensor.
            ValueError: A hyper-parameter is out of its range. Nothing was added.
        """
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            expect_in_range("QuantizedAdam", added)
            self._warm_up.expect_long_enough(float(added["betas"][1]))
            trained = [p for p in added["params"] if p.requires_grad]
            number = len(self.param_groups) - 1
            numbers = [f"group {number}, parameter {i} {list(p.shape)}" for i, p in enumerate(added["params"])]
            names = added.get("param_names", numbers)
            named = [(n, p) for n, p in zip(names, added["params"], strict=True) if p.requires_grad]
            parts = [
                local(p) if self._shares is None else self._shares.of(i, name, local(p))
                for i, (name, p) in enumerate(named)
            ]
            self._core.add([(name, part, number) for (name, _), part in zip(named, parts, strict=True)])
            if self._shares is not None:
                self._shares.add([local(p) for _, p in named])
            self._began = False
            self._names |= {id(p): name for name, p in named}
        except Exception:
            del self.param_groups[-1]
            raise
        self._trained += trained
        self._show_moments()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes a step with this rank's gradients and the others'. Collective over the group.

        Args:
            closure: Computes the gradients again and returns the loss.

        Returns:
            The closure's result, or None.

        Raises:
            ValueError: A gradient is sparse or has another shape; or gradients are not finite: on this rank (over hosts:
                this host), or on another, which the message says with the parameter's name. Nothing has changed on any rank.
            DistBackendError: Ranks differ (what differs first is named), or a peer or the network failed. Nothing has changed.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if not self._began:
            try:
                self._expect_no_ddp()
                if self._shares is not None:
                    self._backend.agree_on_texts("QuantizedAdam", [])
                    self._shares.expect_same()
            except ValueError as mistake:  # the other ranks hear of it in this step
                self._backend.agree_on_texts("QuantizedAdam", [], error=f"ValueError: {mistake}")
                raise
            self._began = True
        expect_usable(
            "QuantizedAdam", self.param_groups, self._trained, lambda p: f"a tensor of shape {tuple(p.shape)}"
        )
        given = getattr(self, "grad_scale", None)
        scale = 1.0 if given is None else inverse_of(given)
        gradients = [None if p.grad is None else local(p.grad) for p in self._trained]
        make = functools.partial(
            self._core.step,
            rules=rules_of(self.param_groups),
            skip=hasattr(self, "found_inf"),
        )
        if self._shares is None:
            make(gradients, scale=scale)
        else:
            self._shares.expect_here([local(p) for p in self._trained])
            mine = self._shares.gradients(gradients, scale)
            self._shares.step(lambda settle: make(mine, scale=1.0, settle=settle))
        self._warm_up.stepped(self.param_groups, self.state, self._names)
        return result

    def _expect_no_ddp(self) -> None:
        """Raises ValueError where DDP averages the gradients that this optimizer averages in codes."""
        others = ranks_of_ddp(self._trained) & self.steps_with
        if others:
            raise ValueError(
                f"QuantizedAdam: expected parameters without DDP, got those of a DDP model over the ranks {sorted(others)} too: "
                "steps average by themselves. Leave DDP out, or give it the ranks of one replica as process_group= and the "
                "ranks that hold the same of other replicas here, as group="
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a run needs, in addition to its model, to go on with the same bits.

        Save one on each rank, by `torch.save` or `torch.distributed.checkpoint`: residuals are a rank's own.

        Returns:
            As torch's optimizers. The state of a parameter is {"step", "variance_step" (the steps in which v has changed),
            "exp_avg" (m), "exp_avg_sq" (v), "rank<r>.residual" (r: this rank), and "rounding" of other types than float32, all
            float32, the optimizer's own memory; "rank<r>.crc", a checksum of them}. Over hosts a rank has the moments of its
            share alone, of some parameters no element: "rank<r>.share<place>of<ranks of a host>.exp_avg" and so on.
        """
        numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}
        share = None if self._shares is None else self._shares.key
        return {
            "state": {
                numbers[id(p)]: _summed(
                    {_key(name, share): self._shown(p, name, tensor) for name, tensor in state.items()}
                )
                for p, state in zip(self._trained, self._core.state(), strict=True)
            },
            "param_groups": super().state_dict()["param_groups"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned on this rank. All ranks load before the same step.

        Raises:
            ValueError: The state is of other parameters or another rank, or it is damaged or was changed, by its checksum.
                Nothing has changed.
        """
        try:
            with loading(self, state_dict, self._trained) as found:
                share = None if self._shares is None else self._shares.key
                moment = _key("exp_avg", share)
                for state in found:
                    if _key("residual") in state and moment not in state:
                        raise ValueError(
                            f"QuantizedAdam: load_state_dict: expected {moment!r}, as a run has with the same hosts=, got "
                            f"{sorted(state)}"
                        )
                states = [_checked(dict(state)) for state in found]
                own = {_key(name, share): name for name in ("residual", *_MOMENTS)}
                self._core.load(
                    [{own.get(name, name): _plain(tensor) for name, tensor in state.items()} for state in states]
                )
                self._warm_up.resumed(max((int(state.get("step", 0)) for state in states), default=0))
        finally:
            self._show_moments()

    def _show_moments(self) -> None:
        """Puts the core's moments where torch's tools look for an optimizer's state. The residuals' memory changes."""
        for p, state in zip(self._trained, self._core.state(), strict=True):
            self.state[p] = {name: self._shown(p, name, state[name]) for name in ("exp_avg", "exp_avg_sq")}

    def _shown(self, parameter: torch.Tensor, name: str, state: Any) -> Any:
        return _like(parameter, name, state) if self._shares is None else state  # a share's is flat


def _like(parameter: torch.Tensor, name: str, state: Any) -> Any:
    """A shard's moment as the parameter's DTensor is. Residuals are a rank's own."""
    if (
        not isinstance(parameter, DTensor)
        or not isinstance(state, torch.Tensor)
        or name in ("residual", "step", "variance_step")
    ):
        return state
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(state, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def _plain(state: Any) -> Any:
    return local(state) if isinstance(state, torch.Tensor) else state


def _key(name: str, share: str | None = None) -> str:
    """A residual is this rank's own, as moments of a share are, and distributed checkpoints keep one tensor of a name."""
    if share and name in _MOMENTS:
        name = f"{share}{name}"
    own = name == "residual" or name.startswith("share")
    return f"rank{dist.get_rank()}.{name}" if own else name


def _crc() -> str:
    return f"rank{dist.get_rank()}.crc"


def _summed(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, _crc(): torch.tensor(checksum(state))}


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter without its checksum, which is a ValueError where it is of other values."""
    if not state or _key("residual") not in state:  # none, or another rank's: that is said by what it lacks
        return state
    values = {name: value for name, value in state.items() if name != _crc()}
    crc = state.get(_crc())
    expect_checksum("QuantizedAdam", values, int(crc) if isinstance(crc, torch.Tensor) else crc)
    return values
