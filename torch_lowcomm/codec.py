"""Codecs by themselves: what a collective would send, without one."""

import logging

from torch_lowcomm import _C
from torch_lowcomm._C import Codec

__all__ = ["Codec", "codec"]

logger = logging.getLogger("torch_lowcomm")
_cautioned: set[str] = set()


def caution(spec: str) -> None:
    """Warns, once a codec and process, of one that is too coarse for its bucket."""
    said = _C.caution(spec)
    if said is not None and said not in _cautioned:
        _cautioned.add(said)
        logger.warning(said)


def caution_of_policy(policy: str) -> None:
    """Warn of codecs in a policy's canonical text that are too coarse for their buckets."""
    for entry in filter(None, policy.split("; ")):
        caution(entry.partition("=")[2])


def codec(spec: str) -> Codec:
    """Makes a codec from its text, the one that options, environment and statistics use too.

        c = lc.codec("minmax4:bucket=1024")
        b = c.encode(x)                 # 1-D uint8 tensor, the bytes that would travel
        y = c.decode(b, x.numel())      # 1-D float32 tensor
        z = c.roundtrip(x)              # decode(encode(x)) in x's shape and dtype
        c.decode(b, y.numel(), out=y)   # into memory that is there: encode and roundtrip take out= too

    This version has, b being 1 to 8 bits:

    * ``none``: the elements themselves.
    * ``minmax<b>``: each bucket's elements on 2**b evenly spaced values from its minimum to its maximum, the nearest one.
    * ``qsgd<b>``: the same grid, rounded at random without bias.
    * ``dither<b>``: the same grid, rounded by one random number a bucket.
    * ``lattice<b>``: a grid shifted by one random number a bucket, the nearest value of it.
    * ``sym<b>``, from 2 bits: a grid around 0 with a level at 0, up to each bucket's largest magnitude.
    * ``mid<b>``: the same with levels half a step away from 0.
    * ``tern``: minus the largest magnitude, 0, or the largest magnitude, in 2 bits.
    * ``sign1``: plus or minus the mean magnitude, in 1 bit.
    * ``gauss<b>``: rotated, then on the 2**b values that err least on a normal distribution, times the root mean square.
    * ``levels<b>``: between each bucket's minimum and maximum on levels of your own, given as ``table=`` to each call.
    * ``fp16``, ``bf16``, ``fp8e4m3``: every element by itself as the nearest number of that type; what is too large
      becomes its largest. ``bf16:round=stochastic``: one of the two neighbours, at random without bias.
    * ``topk:keep=0.2,values=sym8``: the share ``keep`` of the elements that is largest in magnitude, in the named codec,
      with their places; the others decode to 0.
    * ``logbyte``, ``log9``: sign and logarithm in 8 or 9 bits, for numbers of which the order of magnitude matters
      (relative error 6.5 % or 3.2 % within 4e-4 to 2.6e3, the end of that range beyond; NaN and infinities decode to
      NaN).

    Options of the codecs with buckets: ``bucket``, a power of two from 64 to 65,536 elements (default 1024, of ``gauss``
    512), or ``bucket=tensor``, one for all of a tensor; ``axis=channel`` in its place: a scale for each index in the last
    dimension, of which there may be 1 to 65,536 (neither where it rotates, nor ``axis`` with ``levels``); for ``qsgd`` and
    ``lattice`` ``delta``, a step of your own, with which a bucket of a range above (2**b - 1) * delta is an error; for
    ``sym`` and ``mid`` ``range=l2``, up to twice the root mean square instead of the largest magnitude.
    ``meta=bf16`` (not for ``lattice``, nor with ``delta``) rounds a bucket's metadata to bfloat16: half their bytes, and a
    step that is up to 1/128 larger, or more where the values are all far from 0. ``gauss`` does so unless ``meta=fp32``.
    ``rotate=1`` (bucket 512 or more; not for ``levels``; ``gauss`` always does) rotates blocks of 512 elements before all
    else and back after it, by which the elements of any tensor become nearly normal: outliers no longer set a bucket's
    step. ``gain`` multiplies what ``gauss`` decodes, which is shorter than what went in (1.13 undoes it at 2 bits).
    ``nonfinite=error`` (default) refuses NaN, infinities and magnitudes of 2**126 and more, 2**120 where it rotates;
    ``saturate`` sends 0 for a NaN and the bucket's largest magnitude for the others; ``poison`` sends a bucket that decodes
    to NaN. Casts and ``topk`` have it too: a cast takes any finite element, an infinity saturates to the largest number of
    the element's type, and poison sends a NaN for the one element.

    A bucket's step is (max - min) / (2**b - 1), its largest magnitude / 2**(b - 1) for ``sym`` and ``mid``. An element's
    error is at most half a step, or a step with ``qsgd``, ``dither`` and for the largest elements with ``sym``. A payload
    has b bits an element and 8 bytes a bucket, 4 for the codecs around 0 and ``gauss``, half of it
    with ``meta=bf16``.

    The method is that of QSDP, which sends weights by the nearest value and gradients by the stochastic one: Markov,
    Vladu, Guo, Alistarh, "Quantized Distributed Training of Large Models with Convergence Guarantees", ICML 2023.

    Args:
        spec: ``name<bits>:key=value,...``, for example ``"minmax8:bucket=1024"`` or ``"qsgd4"``.

    Returns:
        A stateless codec, safe to use from several threads. Its bytes are the same on every machine.

    Raises:
        ValueError: The text names no codec, or an option or value that this version does not have.

    One that is too coarse for its bucket (1 or 2 bits, 512 elements and more) is warned of, with the errors measured there.
    """
    made = Codec(spec)
    caution(made.spec)
    return made
