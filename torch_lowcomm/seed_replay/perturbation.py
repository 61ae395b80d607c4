"""The interface of the ways to perturb a model's weights while it is evaluated."""

from contextlib import AbstractContextManager
from typing import Protocol


class Perturbation(Protocol):
    """What `AtUse`, `InPlace` and, for shards of FSDP2, `InShards` do."""

    def at(self, sample: int, factor: float) -> AbstractContextManager[None]:
        """Inside the context the model has the weights w + factor·z of a sample."""

    def complete(self) -> bool:
        """After an evaluation at a factor other than 0: whether all parameters were perturbed. If not, evaluate again."""

    def put_back(self) -> None:
        """Ends an iteration's evaluations."""

    def applied(self, record: bytes) -> None:
        """Follows the core, which has applied a record."""

    def restore(self) -> None:
        """Sets the model's weights to the core's."""

    def take(self) -> None:
        """Sets the core's weights to the model's, which were loaded."""
