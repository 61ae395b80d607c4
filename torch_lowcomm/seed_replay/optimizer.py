"""SeedReplay: fine-tuning by forward passes alone, which sends one byte for each gradient."""

import inspect
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_lowcomm import _C
from torch_lowcomm._copies import NotCopied
from torch_lowcomm.seed_replay.exchange import Exchange
from torch_lowcomm.seed_replay.machine import Meeting, connected
from torch_lowcomm.seed_replay.machine_ranks import MachineRanks
from torch_lowcomm.seed_replay.measure import LossWatch, Measure, default_rate
from torch_lowcomm.seed_replay.options import SeedReplayOptions
from torch_lowcomm.seed_replay.shards import Entry, entries, layout, mesh_of
from torch_lowcomm.seed_replay.weights import TrainedWeights


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
        group: Static machines: the ranks of this process group, one all_gather an iteration. None, without `store` and
            `exchange`: one machine. Of a machine of several ranks only the first rank's group counts.
        store: Machines come and go over this c10d store (`StoreExchange`, which takes more options, as `exchange=`).
        machine_id: With a store: id of this machine, a number or a name, different from all others.
        exchange: Another way in which machines meet.
        checkpoint: A folder for snapshots and the log since the last one. If it has some, the model goes on from them.
        **options: Fields of `SeedReplayOptions` (`torch_lowcomm.seed_replay`), which has their defaults and meanings: eps,
            samples, noise, codec, estimator, pool, base, perturb and others.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An option or a parameter is wrong; or, with the first `step()`, machines differ.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        store: dist.Store | None = None,
        machine_id: int | str | None = None,
        exchange: Exchange | None = None,
        checkpoint: str | Path | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"SeedReplay: model: expected a torch.nn.Module, got {type(model).__name__}")
        mesh, self._options = mesh_of(model), SeedReplayOptions.named(**options)
        self._ranks = MachineRanks(mesh)
        parameters = [p for p in model.parameters() if p.requires_grad]
        lr, self._watch = default_rate(parameters) if lr is None else lr, LossWatch(parameters)
        meeting, own = Meeting(group, store, machine_id, exchange), list[Entry]()
        self.steps_with = meeting.others  # DiLoCoX does not take them for sites

        def checked() -> str:
            """Returns what all ranks of this machine must have in common."""
            met = meeting.expect(self._ranks.ranks)
            self._options.expect(lr)
            own.extend(entries(model))
            layouts = [layout(name, p) for (name, _, _, _), p in zip(own, parameters, strict=True)]
            kept = checkpoint is not None
            return " ".join([self._options.of_machine(), f"meeting={met}", f"checkpoint={kept}", *layouts])

        self._ranks.agree("options and parameters", checked)
        super().__init__(parameters, {"lr": lr, "weight_decay": self._options.weight_decay})
        inner: Exchange | None = None  # of the machine's first rank

        def begun() -> None:
            nonlocal inner
            if self._ranks.first:
                inner = meeting.begin(samples=None if self._options.seconds else self._options.most_samples)

        self._ranks.agree("exchange", begun)
        machine = self._ranks.gather(None if inner is None else inner.machine)[0]
        self._weights = TrainedWeights(model, own, self._options, machine, self._ranks)
        self._measure = Measure(model, self._weights.perturbation, self._options, self._ranks)
        self._joined, self._counts = False, {"gradients": 0, "payload_bytes": 0, "skipped": 0}
        kept = None if checkpoint is None else Path(checkpoint)
        self._exchange, self._checkpoint = connected(
            self, self._ranks, inner, machine, kept, every=self._options.snapshot_every
        )
        if self._checkpoint is not None:
            self._checkpoint.restore(self)

    @property
    def core(self) -> _C.SeedReplay:
        """The C++ core: iteration, log, checksum. On a machine of several ranks its `checksum()` is a collective of them."""
        return self._weights.core

    @property
    def iteration(self) -> int:
        """Iterations since the run began, those before this machine came included."""
        return self.core.iteration

    def join(self) -> None:
        """Meets the other machines and applies the records that they have so far; else the first `step()` does it.

        Raises:
            ValueError: They run something else.
        """
        if not self._joined:
            self._exchange.join(self.core)
            self._joined = True
            self._weights.perturbation.restore()

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
        self._ranks.agree("step", lambda: self._weights.expect_rates(lr, weight_decay))  # before others hear of them
        self.join()
        losses, estimates = self._measure(closure)
        core, perturbation = self.core, self._weights.perturbation
        before, record = core.iteration, None
        message = core.message(self._exchange.machine, estimates)
        try:
            record = self._exchange.exchange(core, message, lr=lr, weight_decay=weight_decay)
        finally:
            # The others went on, and the measurements are void; or a perturbation in place must leave no rounding.
            if record is None or core.iteration != before:
                perturbation.restore()
        self._apply(record)
        every = self._options.check_every
        if every and core.iteration % every == 0 and self._exchange.check(core):
            perturbation.restore()
            if self._checkpoint is not None:
                self._checkpoint.restart(self)
        return self._watch(losses, lr)

    def stats(self) -> dict[str, Any]:
        """Counts since construction.

        Returns:
            `iteration`; `gradients`, applied estimates of all machines; `evaluations` of the loss on this machine; `skipped`,
            estimates that were not finite; `payload_bytes`, codes of the other machines' estimates; and `Exchange.stats`.
        """
        return {
            "iteration": self.iteration,
            "evaluations": self._measure.evaluations,
            **self._counts,
            **self._exchange.stats(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the groups' options, and `replay`: iteration, checksum of the weights, the pool's sums."""
        return {**super().state_dict(), "replay": self._weights.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned. Load the model's own state first.

        Raises:
            ValueError: The state is of another model, of other options, or of other weights.
        """

        def told() -> list[Any]:
            replay = state_dict.get("replay")
            if replay is None:
                raise ValueError(f"SeedReplay: state: expected the key 'replay', got {sorted(state_dict)}")
            self._weights.expect_same(replay)
            return [replay["iteration"], replay["checksum"], list(replay["sums"])]

        self._ranks.agree("state", told)
        groups = {key: value for key, value in state_dict.items() if key != "replay"}
        self._weights.load(state_dict["replay"], lambda: super(SeedReplay, self).load_state_dict(groups))
        if self._checkpoint is not None:
            self._checkpoint.restart(self)

    def dequantized(self) -> dict[str, torch.Tensor]:
        """Returns copies of the trained parameters by name; of a quantized base the values that its codes mean.

        Of a sharded model they are DTensors like its parameters.
        """
        return self._weights.values()

    def snapshot(self) -> dict[str, Any]:
        """Returns everything that another process needs to go on.

        Returns:
            `optimizer`, the state, and `weights` by name, or None with a quantized base, which is in the base model's own file.
            Of a sharded model the first rank of the machine has the whole weights, in host memory, and the others none.
        """
        weights = self._weights.whole()
        return {"optimizer": self.state_dict(), "weights": weights}

    def load_snapshot(self, saved: dict[str, Any]) -> None:
        """Sets weights and state to a snapshot's; on a machine of several ranks to that which its first rank gives.

        Raises:
            ValueError: The snapshot is of another model or other options.
        """
        saved = self._weights.part_of(saved)
        self._weights.expect_same(saved["optimizer"]["replay"])
        with self._weights.replaced(saved["weights"]):
            self.load_state_dict(saved["optimizer"])

    def replay(self, records: bytes) -> int:
        """Applies records of the present iteration and later ones, for example of a log.

        Returns:
            Number of estimates in them that were applied.

        Raises:
            ValueError: The records are spoilt or begin at another iteration; nothing was applied.
        """
        self._ranks.agree("records", lambda: [len(records), zlib.crc32(records)])
        taken = self.core.apply(records)
        self._weights.perturbation.restore()
        return taken

    def _apply(self, record: bytes) -> None:
        (said,) = _C.read_replay_records(record)
        taken = self.core.apply(record)
        self._weights.perturbation.applied(record)
        self._counts["gradients"] += taken
        self._counts["skipped"] += sum(said["counts"]) - taken
        self._counts["payload_bytes"] += sum(
            size
            for machine, size in zip(said["machines"], said["payload_bytes"], strict=True)
            if machine != self._exchange.machine
        )
        if self._checkpoint is not None:
            self._checkpoint.applied(self)


SeedReplay.__signature__ = SeedReplayOptions.completed(inspect.signature(SeedReplay))  # type: ignore[attr-defined]
