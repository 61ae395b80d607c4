"""Whether ranks returned the same, as the mark `on` can ask for (conftest.py)."""


def expect_alike(found):
    """Asserts that all ranks returned the same, except those that returned None or were killed."""
    found = [value for value in found if value is not None]
    assert len(found) > 1 and all(_equal(value, found[0]) for value in found), found


def _equal(a, b):
    """Whether two nests of lists, tuples and tensors are equal."""
    import torch  # not where a rank of a fresh interpreter has its environment to set first

    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b
