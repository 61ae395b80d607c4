"""A stage is a file here with a function of the same name, which gets a `Trial` on each of two ranks, or is in `TRAININGS`."""

# In the order in which a fault in one would explain faults in those after it. By name: what starts them does not import
# the extension, which may not be built yet.
STAGES = (
    "info",
    "staged",
    "streams",
    "futures",
    "exact",
    "nonfinite",
    "ddp",
    "fsdp2",
    "diloco",
    "seed_replay",
    "p2p",
    "pipeline",
    "subspace",
    "adam",
    "two_level",
    "nccl_one",
    "speed",
)

# Those that train on the device as on the host, and check nothing else: the trainings' names.
TRAININGS = {
    "pipeline": ("pipeline", "pipeline_of_changes"),
    "subspace": ("subspace",),
    "adam": ("quantized_adam",),
    "two_level": ("fsdp2_over_hosts", "fsdp2_on_one_host"),
}
