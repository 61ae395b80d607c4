"""The error that a machine ends with when its weights are not the others'."""


class ReplayMismatch(RuntimeError):
    """Machines that applied the same records have different weights: something else has written to them."""
