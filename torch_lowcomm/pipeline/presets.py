"""The settings of AQ-SGD's paper by name, for comparisons with it (Wang et al., NeurIPS 2022, section 4).

Activations and gradients have a scale a channel. The paper partitions [-1, 1] into 2^b intervals, as mid<b> does; sym<b> has a
level at 0 and one level less, which is a quarter of the levels at 2 bits.
"""

FIRST = "minmax8:bucket=128"  # without a preset, the codec of first visits
PRESETS = {
    "paper:2/4": ("mid2:axis=channel", "sym4:axis=channel"),
    "paper:3/6": ("sym3:axis=channel", "sym6:axis=channel"),
    "paper:4/8": ("sym4:axis=channel", "sym8:axis=channel"),
}


def codecs(
    preset: str | None, forward: str | None, backward: str | None, first_visit: str | None
) -> tuple[str | None, str | None, str | None]:
    """The codecs of activations, of gradients and of first visits: a preset's, or without one those that are given."""
    if preset is None:
        return forward, backward, first_visit
    if preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    for option, given, default in (
        ("forward", forward, None),
        ("backward", backward, None),
        ("first_visit", first_visit, FIRST),
    ):
        if given not in (None, default):
            raise ValueError(f"{option}: expected none with preset {preset!r}, got {given!r}")
    return *PRESETS[preset], None
