"""SeedReplay: fine-tuning by forward passes alone, which sends one byte for each gradient."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_lowcomm import _C
from torch_lowcomm._copies import NotCopied
from torch_lowcomm._text_difference import differing_parts
from torch_lowcomm.seed_replay.checkpoint import Checkpoint
from torch_lowcomm.seed_replay.estimators import ESTIMATORS
from torch_lowcomm.seed_replay.exchange import Exchange
from torch_lowcomm.seed_replay.machine import MachineCheckpoint, MachineExchange, SeveralRanks, exchange_of
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks
from torch_lowcomm.seed_replay.measure import Measure
from torch_lowcomm.seed_replay.options import expect_meeting, expect_numbers, expect_ways, most_samples
from torch_lowcomm.seed_replay.rate import LossWatch, default_rate
from torch_lowcomm.seed_replay.shards import expect_same_memory, layout, like, mesh_of
from torch_lowcomm.seed_replay.snapshot import gathered, packed, scattered, unpacked
from torch_lowcomm.seed_replay.store import StoreExchange
from torch_lowcomm.seed_replay.weights import Entry, core_and_perturbation, entries


class SeedReplay(NotCopied, torch.optim.Optimizer):
    """Zeroth-order optimizer: machines measure the loss along directions that they make from seeds, and send one byte for each.

        opt = lc.SeedReplay(model, samples=4, group=dist.group.WORLD)
        for batches in data:
            loss = opt.step(lambda sample: loss_of(model, batches[sample]))

    Every machine makes all directions again and takes the same step, θ ← θ − lr/√k · Σ decoded(estimate)·z over the k
    estimates of an iteration (Zelikman et al., Just One Byte (per Gradient), 2023; MeZO, arXiv 2305.17333). So weights stay
    equal to the bit, on any device, and never travel. The model is evaluated in eval mode without gradients: dropout and
    running means are off.

    Use it among trusted peers only: a wrong byte steers every machine, and projected gradients do not keep the data secret.

    A machine may have several ranks that FSDP2 shards the model over. Each moves its own shards; a loss is the mean of theirs,
    and the first rank alone talks to other machines. All of them make the optimizer and call each of its methods together.

    Learning-rate schedulers work on it (the same one on every machine). `state_dict` has the state that the weights do not.

    Args:
        model: Its parameters that require gradients are trained: all, or adapters (LoRA) alone. float32, float16 or bfloat16.
            Plain tensors, or DTensors with Shard(0) after `fully_shard`, all on one mesh: that of the machine's ranks.
        lr: η; None for 0.3 / √(trained parameters). With `lr_scale` "sqrt", the paper's, the step is η/√k; with "mean" η/k.
        eps: ε, how far along a direction the loss is measured.
        samples: n, the number of directions of a machine in an iteration; with `seconds` the most.
        seconds: Time for which every iteration takes directions; it takes at least one.
        weight_decay: θ ← θ·(1 − lr·weight_decay) of parameters with two dimensions or more.
        noise: "rademacher", ±1, or "gaussian".
        codec: Codec of estimates: "logbyte" (sign and rounded logarithm in a byte), "log9", "sign1", "fp16", "none".
        lr_scale: "sqrt" or "mean", as under `lr`.
        estimator: "two-sided" (2 evaluations a sample), "one-sided" (1, and 1 an iteration; divided by the losses' standard
            deviation, FZOO), "previous" (1, against the loss before).
        pool: Number K of fixed directions to take from (FedKSeed, arXiv 2312.06353); 0: each direction is new.
        base: "int8" or "nf4": keep the weights quantized, in blocks of 64, and never write them. Their change is kept as the
            pool's K sums (needs `pool`, noise "rademacher", and no weight decay). The parameters' own memory is given up.
            Every use of a weight makes the K directions again, so a step's time grows with K.
        perturb: "at-use": each layer's weights when it reads them, in a separate tensor. "in-place": the weights themselves,
            with a copy that puts them right every `restore_every` iterations, for models that a compiler has traced.
        restore_every: n_b of "in-place".
        seed: Seed of the run.
        group: Static machines: the ranks of this process group, one all_gather an iteration. None, without `store` and
            `exchange`: one machine. Of a machine of several ranks only the first rank's group counts.
        store: Machines come and go over this c10d store (`StoreExchange`, which takes more options, as `exchange=`).
        machine_id: With a store: id of this machine, a number or a name, different from all others.
        exchange: Another way in which machines meet.
        check_every: Iterations between comparisons of checksums; 0 for never.
        checkpoint: A folder for snapshots and the log since the last one. If it has some, the model goes on from them.
        snapshot_every: Iterations from one snapshot to the next.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An option or a parameter is wrong; or, with the first `step()`, machines differ.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        eps: float = 1e-3,
        samples: int | None = None,
        seconds: float | None = None,
        weight_decay: float = 0.0,
        noise: str = "rademacher",
        codec: str = "logbyte",
        lr_scale: str = "sqrt",
        estimator: str = "two-sided",
        pool: int = 0,
        base: str | None = None,
        perturb: str = "at-use",
        restore_every: int = 1,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        store: dist.Store | None = None,
        machine_id: int | str | None = None,
        exchange: Exchange | None = None,
        check_every: int = 100,
        checkpoint: str | Path | None = None,
        snapshot_every: int = 1000,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"SeedReplay: model: expected a torch.nn.Module, got {type(model).__name__}")
        mesh, most = mesh_of(model), most_samples(samples, seconds)
        self._ranks = None if mesh is None else MachineRanks(mesh)
        parameters = [p for p in model.parameters() if p.requires_grad]
        lr, self._watch = default_rate(parameters) if lr is None else lr, LossWatch(parameters)
        options = {
            "noise": noise,
            "codec": codec,
            "lr_scale": lr_scale,
            "seed": seed,
            "pool": pool,
            "base": base or "",
            "agreed": f"check_every={check_every}",
        }
        own: list[Entry] = []

        def checked() -> str:
            """Returns what all ranks of this machine must have in common."""
            ranks = [] if self._ranks is None else self._ranks.ranks
            meeting = expect_meeting(group=group, store=store, machine_id=machine_id, exchange=exchange, ranks=ranks)
            least = {
                "samples": (most, 1),
                "pool": (pool, 0),
                "restore_every": (restore_every, 1),
                "check_every": (check_every, 0),
                "snapshot_every": (snapshot_every, 1),
                "seed": (seed, 0),
            }
            expect_numbers(lr=lr, eps=eps, seconds=seconds, weight_decay=weight_decay, least=least)
            ways = {"estimator": estimator, "samples": most, "perturb": perturb, "base": base}
            expect_ways(**ways, weight_decay=weight_decay, sharded=mesh is not None)
            own.extend(entries(model))
            told = {**options, **ways, "eps": eps, "seconds": seconds, "restore_every": restore_every}
            told |= {"meeting": meeting, "checkpoint": checkpoint is not None, "snapshot_every": snapshot_every}
            layouts = [layout(name, p) for (name, _, _, _), p in zip(own, parameters, strict=True)]
            return " ".join([f"{name}={value}" for name, value in told.items()] + layouts)

        self._agree("options and parameters", checked)
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        inner: Exchange | None = None  # of the machine's first rank

        def met() -> None:
            nonlocal inner
            if self._ranks is None or self._ranks.first:
                inner = exchange or exchange_of(group, store, machine_id, samples=most if seconds is None else None)

        self._agree("exchange", met)
        number = None if inner is None else inner.machine
        machine = number if self._ranks is None else self._ranks.gather(number)[0]
        core, self._perturbation = core_and_perturbation(
            model, own, options, machine, perturb=perturb, restore_every=restore_every, sharded=mesh is not None
        )
        self._parameters, self._quantized = parameters, base is not None
        if self._quantized:  # the core has taken the weights' memory: no reference may keep it
            own = [(name, p.detach(), *rest) for (name, _, *rest), p in zip(own, parameters, strict=True)]
        self._own = own
        self._estimator = ESTIMATORS[estimator](eps)
        self._measure = Measure(
            model, self._perturbation, self._estimator, samples=most, seconds=seconds, ranks=self._ranks
        )
        self._check_every, self._joined = check_every, False
        self._counts = {"gradients": 0, "payload_bytes": 0, "skipped": 0}
        folder = None if checkpoint is None or inner is None else Checkpoint(Path(checkpoint), snapshot_every)
        self._core, self._exchange, self._checkpoint, speaker = core, inner, folder, self
        if self._ranks is not None:
            several = SeveralRanks(self, core, own, self._ranks)
            self._core, speaker = several.core, several.optimizer
            self._exchange = MachineExchange(inner, several, machine)
            self._checkpoint = None if checkpoint is None else MachineCheckpoint(folder, several)
        if isinstance(inner, StoreExchange):
            inner.attach(lambda: packed(speaker.snapshot()), lambda data: speaker.load_snapshot(unpacked(data)))
        if self._checkpoint is not None:
            self._checkpoint.restore(self)

    @property
    def core(self) -> _C.SeedReplay:
        """The C++ core: iteration, log, checksum. On a machine of several ranks its `checksum()` is a collective of them."""
        return self._core

    @property
    def iteration(self) -> int:
        """Iterations since the run began, those before this machine came included."""
        return self._core.iteration

    def join(self) -> None:
        """Meets the other machines and applies the records that they have so far; else the first `step()` does it.

        Raises:
            ValueError: They run something else.
        """
        if not self._joined:
            self._exchange.join(self._core)
            self._joined = True
            self._perturbation.restore()

    def leave(self) -> None:
        """Ends this machine's part. It may be called any number of times; the next `step()` joins again."""
        self._exchange.leave()
        self._joined = False

    def step(self, closure: Callable[..., Any] | None = None) -> float:  # type: ignore[override]
        """Makes an iteration: measures losses, exchanges messages, and applies the record.

        Args:
            closure: Evaluates the loss with the model as it is, without gradients: a number or a tensor of one element. If it
                takes an argument, it gets the batch's number within the iteration, 0 to samples - 1. Calls with the same
                number must use the same batch. Two-sided, every sample has a batch and two calls; one-sided, all share batch 0.

        Returns:
            The mean of the losses that were measured on this machine, NaN if none was finite.

        Raises:
            ValueError: There is no closure, or a rate is not finite, or rates differ in a static group.
            DistBackendError, ConnectionError, TimeoutError, RuntimeError: The exchange failed. This machine's measurements
                are not applied then, but records that it had missed may be.
            RuntimeError: The checksums differ, after the iteration was applied.
        """
        if closure is None:
            raise ValueError("SeedReplay: step: expected a closure that evaluates the loss, got None")
        group = self.param_groups[0]
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        self._agree("step", lambda: self._rates(lr, weight_decay))  # before others hear of them
        self.join()
        losses, estimates = self._measure(closure)
        before = self._core.iteration
        message = self._core.message(self._exchange.machine, estimates)
        record = None
        try:
            record = self._exchange.exchange(self._core, message, lr=lr, weight_decay=weight_decay)
        finally:
            # The others went on, and the measurements are void; or a perturbation in place must leave no rounding.
            if record is None or self._core.iteration != before:
                self._perturbation.restore()
        self._apply(record)
        if self._check_every and self._core.iteration % self._check_every == 0 and self._exchange.check(self._core):
            self._perturbation.restore()
            if self._checkpoint is not None:
                self._checkpoint.restart(self)
        return self._watch(losses, lr)

    def stats(self) -> dict[str, Any]:
        """Counts since construction.

        Returns:
            `iteration`; `gradients`, applied estimates of all machines; `evaluations` of the loss on this machine; `skipped`,
            estimates that were not finite; `payload_bytes`, codes of the other machines' estimates; and the exchange's counts:
            `machines` of the last iteration, `sent_bytes`, `received_bytes`, `waited_s`.
        """
        return {
            "iteration": self._core.iteration,
            "evaluations": self._measure.evaluations,
            **self._counts,
            **self._exchange.stats(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the groups' options, and `replay`: iteration, checksum of the weights, the pool's sums."""
        state = super().state_dict()
        state["replay"] = {
            "iteration": self._core.iteration,
            "checksum": self._core.checksum(),
            "sums": self._core.sums,
            "description": self._core.description,
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned. Load the model's own state first.

        Raises:
            ValueError: The state is of another model, of other options, or of other weights.
        """

        def told() -> list[Any]:
            replay = state_dict.get("replay")
            if replay is None:
                raise ValueError(f"SeedReplay: state: expected the key 'replay', got {sorted(state_dict)}")
            self._expect_same(replay["description"])
            return [replay["iteration"], replay["checksum"], list(replay["sums"])]

        self._agree("state", told)
        replay = state_dict["replay"]
        self._perturbation.take()
        sums = self._core.sums
        self._core.sums = replay["sums"]
        try:
            found = self._core.checksum()
            if found != replay["checksum"]:
                raise ValueError(
                    f"SeedReplay: state: expected weights with CRC-32C {replay['checksum']:08x}, which it was saved with, got "
                    f"{found:08x}: load the model's state first"
                )
            super().load_state_dict({key: value for key, value in state_dict.items() if key != "replay"})
        except BaseException:
            self._core.sums = sums
            raise
        self._core.iteration = replay["iteration"]
        self._perturbation.restore()
        if self._checkpoint is not None:
            self._checkpoint.restart(self)

    def dequantized(self) -> dict[str, torch.Tensor]:
        """Returns copies of the trained parameters by name; of a quantized base the values that its codes mean.

        Of a sharded model they are DTensors like its parameters.
        """
        copies = [self._core.perturbed(number, 0, 0, 0.0) for number in range(len(self._own))]
        return {name: like(w, p) for (name, _, _, _), w, p in zip(self._own, copies, self._parameters, strict=True)}

    def snapshot(self) -> dict[str, Any]:
        """Returns everything that another process needs to go on.

        Returns:
            `optimizer`, the state, and `weights` by name, or None with a quantized base, which is in the base model's own file.
            Of a sharded model the first rank of the machine has the whole weights, in host memory, and the others none.
        """
        weights = None if self._quantized else self.dequantized()
        if self._ranks is not None and weights is not None:
            weights = gathered(weights, self._ranks)
        return {"optimizer": self.state_dict(), "weights": weights}

    def load_snapshot(self, saved: dict[str, Any]) -> None:
        """Sets weights and state to a snapshot's; on a machine of several ranks to that which its first rank gives.

        Raises:
            ValueError: The snapshot is of another model or other options.
        """
        if self._ranks is not None:
            saved = scattered(saved, self._own, self._parameters, self._ranks)
        self._expect_same(saved["optimizer"]["replay"]["description"])
        if saved["weights"] is None:
            self.load_state_dict(saved["optimizer"])
            return
        before = [weight.clone() for _, weight, _, _ in self._own]
        try:
            with torch.no_grad():
                for name, weight, _, _ in self._own:
                    weight.copy_(saved["weights"][name])
            self.load_state_dict(saved["optimizer"])
        except BaseException:
            with torch.no_grad():
                for (_, weight, _, _), value in zip(self._own, before, strict=True):
                    weight.copy_(value)
            self._perturbation.take()
            raise

    def replay(self, records: bytes) -> int:
        """Applies records of the present iteration and later ones, for example of a log.

        Returns:
            Number of estimates in them that were applied.

        Raises:
            ValueError: The records are spoilt or begin at another iteration; nothing was applied.
        """
        self._agree("records", lambda: [len(records), zlib.crc32(records)])
        taken = self._core.apply(records)
        self._perturbation.restore()
        return taken

    def _agree(self, topic: str, make: Callable[[], Any]) -> None:
        """Calls `make`; the ranks of a machine of several compare what it returns, and hear of one on which it raises."""
        if self._ranks is None:
            make()
        else:
            self._ranks.agree(topic, make)

    def _rates(self, lr: float, weight_decay: float) -> list[Any]:
        """Checks what an iteration begins with, and returns what ranks of a machine have in common then."""
        self._core.check_rates(lr=lr, weight_decay=weight_decay)
        if self._ranks is not None:
            expect_same_memory(self._own, self._parameters)
        return [self._core.iteration, lr, weight_decay]

    def _expect_same(self, description: str) -> None:
        if description != self._core.description:
            mine, saved = differing_parts(self._core.description, description)
            raise ValueError(f"SeedReplay: state: expected one of {mine!r}, got one of {saved!r}")

    def _apply(self, record: bytes) -> None:
        (said,) = _C.read_replay_records(record)
        taken = self._core.apply(record)
        self._perturbation.applied(record)
        self._counts["gradients"] += taken
        self._counts["skipped"] += sum(said["counts"]) - taken
        own = said["machines"].index(self._exchange.machine) if self._exchange.machine in said["machines"] else None
        self._counts["payload_bytes"] += sum(said["payload_bytes"]) - (0 if own is None else said["payload_bytes"][own])
        if self._checkpoint is not None:
            self._checkpoint.applied(self)
