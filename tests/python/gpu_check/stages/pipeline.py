"""Pipelines with coded messages, and with coded changes, train on the device as on the host."""

import device_trainings as trainings


def pipeline(t):
    t.init()
    return t.compare(trainings.pipeline, trainings.pipeline_of_changes)
