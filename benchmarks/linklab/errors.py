"""The errors of a lab, other than ValueError for a caller's mistake."""


class LabError(RuntimeError):
    """A lab that could be made did not do what was asked: a command failed, a rank did not end in time."""


class LabUnavailable(LabError):
    """This machine or user cannot make a lab: not Linux, not root, a tool or a part of the kernel is missing."""
