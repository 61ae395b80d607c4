"""The ways to perturb a model's weights while it is evaluated: what they have in common."""

from contextlib import AbstractContextManager


class Perturbation:
    """The base of `AtUse`, `InPlace` and, for shards of FSDP2, `InShards`: the model's weights are the core's own."""

    def at(self, sample: int, factor: float) -> AbstractContextManager[None]:
        """Inside the context the model has the weights w + factor·z of a sample."""
        raise NotImplementedError

    def complete(self) -> bool:
        """After an evaluation at a factor other than 0: whether all parameters were perturbed. If not, evaluate again."""
        return True

    def put_back(self) -> None:
        """Ends an iteration's evaluations."""

    def applied(self, record: bytes) -> None:
        """Follows the core, which has applied a record."""
        self.restore()

    def restore(self) -> None:
        """Sets the model's weights to the core's."""

    def take(self) -> None:
        """Sets the core's weights to the model's, which were loaded."""
