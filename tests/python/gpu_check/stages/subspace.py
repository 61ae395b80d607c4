"""A subspace pipeline and SubspaceAdamW train on the device as on the host."""

import device_trainings as trainings


def subspace(t):
    t.init()
    return t.compare(trainings.subspace)
