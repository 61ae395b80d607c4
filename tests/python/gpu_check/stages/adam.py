"""QuantizedAdam trains on the device as on the host, through its warm-up and after it."""

import device_trainings as trainings


def adam(t):
    t.init()
    return t.compare(trainings.quantized_adam)
