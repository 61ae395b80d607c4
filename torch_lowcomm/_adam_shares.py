"""One coded copy a host for QuantizedAdam: each of a host's ranks steps a share of the parameters and hands it to the others."""

from collections.abc import Callable, Sequence

import torch

from torch_lowcomm._checksum import checksum
from torch_lowcomm._host_levels import HostLevels


class AdamShares:
    """Cuts parameters into a share for each place of a host; the ranks at one place of all hosts step theirs together."""

    def __init__(self, levels: HostLevels) -> None:
        self._levels = levels
        self._tensors: list[torch.Tensor] = []  # parameters, or this rank's shards of them, that require gradients
        self._parts: list[list[torch.Tensor]] = []  # of each: what each place steps, [elements], in the order of memory

    def of(self, number: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the part of the n-th parameter to come that this rank steps: [elements] of its memory, maybe none. Memory with
        gaps is a ValueError.
        """
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            raise ValueError(
                f"QuantizedAdam: {name}: expected memory without gaps, got strides {tensor.stride()} of shape "
                f'{tuple(tensor.shape)}: pass contiguous parameters, or hosts="flat"'
            )
        first = self._tensors[0] if self._tensors else tensor
        if tensor.device != first.device:
            raise ValueError(
                f"QuantizedAdam: {name}: expected parameters of one device, {first.device}, got {tensor.device}: pass "
                'hosts="flat"'
            )
        return self._cut(len(self._tensors) + number, tensor)[self._levels.place]

    @property
    def key(self) -> str:
        """What names of this rank's state begin with, in a checkpoint."""
        return f"share{self._levels.place}of{self._levels.ranks}."

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Adds parameters, of which the core has this rank's parts."""
        for tensor in tensors:
            self._parts.append(self._cut(len(self._tensors), tensor))
            self._tensors.append(tensor)

    def _cut(self, turn: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        flat = tensor.as_strided((tensor.numel(),), (1,))
        return [flat[begin:end] for begin, end in self._levels.cut(len(flat), turn)]

    def expect_same(self) -> None:
        """Compares the parameters of a host's ranks; DistBackendError where they differ."""
        held = {str(number): tensor for number, tensor in enumerate(self._tensors)}
        self._levels.expect_same("parameters", f"checksum {checksum(held)}")

    def gradients(self, gradients: Sequence[torch.Tensor | None], scale: float) -> list[torch.Tensor]:
        """Returns this rank's parts of the host's average of `scale` times the gradients, float32; None counts as zeros. Each
        rank has a scale of its own: gradient scalers differ once a gradient of one rank has not been finite.
        """
        lengths = [tensor.numel() for tensor in self._tensors]
        device = self._tensors[0].device if self._tensors else None
        whole = torch.zeros(sum(lengths), device=device)
        flats = whole.split(lengths)
        for flat, tensor, gradient in zip(flats, self._tensors, gradients, strict=True):
            if gradient is not None:
                flat.as_strided(tensor.shape, tensor.stride()).copy_(gradient)
        if scale != 1:
            whole.mul_(scale)
        self._levels.average_inside(whole)
        mine = []
        for flat, tensor, parts in zip(flats, self._tensors, self._parts, strict=True):
            part = parts[self._levels.place]
            begin = part.storage_offset() - tensor.storage_offset()
            mine.append(flat[begin : begin + len(part)])
        return mine

    def step(self, run: Callable[[Callable[[str], str]], object]) -> None:
        """Runs a step of this rank's share. `run` is given what the core asks, once, before it changes anything: whether the
        other shares of this host came. Then shares are handed out.
        """
        asked = False

        def settle(not_finite: str) -> str:
            nonlocal asked
            asked = True
            # Of the host's average: which of its ranks it was is not known.
            return self._levels.settle("QuantizedAdam", None, not_finite.replace(" on this rank", " on this host"))

        try:
            run(settle)
        except Exception as error:
            if not asked:
                self._levels.settle("QuantizedAdam", error)
            raise
        self._levels.share([[parts[place] for parts in self._parts] for place in range(self._levels.ranks)])

    def expect_here(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises ValueError where a parameter's memory is another than that whose parts are stepped."""
        for number, (tensor, kept) in enumerate(zip(tensors, self._tensors, strict=True)):
            if tensor.data_ptr() != kept.data_ptr():
                raise ValueError(
                    f"QuantizedAdam: step: parameter {number}: expected the memory that it had when it was added, got other "
                    "memory (.data was set, or the model was moved): make the optimizer after that"
                )
