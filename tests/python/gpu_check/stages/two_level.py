"""Ops over hosts and ranks of a host, alone and under FSDP2, give on the device what they give on the host."""

import device_trainings as trainings


def two_level(t):
    t.init()
    return t.compare(trainings.two_level, trainings.fsdp2_over_hosts, trainings.fsdp2_on_one_host)
