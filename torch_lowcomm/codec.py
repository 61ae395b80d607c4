"""Codecs without a collective: the bytes that a collective would send."""

import torch

from torch_lowcomm import _C
from torch_lowcomm._C import Codec
from torch_lowcomm._log import logger

__all__ = ["Codec", "codec"]

CODED = (torch.float32, torch.float16, torch.bfloat16)  # tensors of other types travel exact

_cautioned: set[str] = set()


def caution(spec: str) -> None:
    """Warns of a codec that is too coarse for its bucket, once for each codec in a process."""
    said = _C.caution(spec)
    if said is not None and said not in _cautioned:
        _cautioned.add(said)
        logger.warning(said)


def caution_of_policy(policy: str) -> None:
    """Warn of codecs in a policy's canonical text that are too coarse for their buckets."""
    for entry in filter(None, policy.split("; ")):
        caution(entry.partition("=")[2])


def codec(spec: str) -> Codec:
    """Makes a codec from its text. Options, environment and statistics use the same text.

        c = lc.codec("minmax4:bucket=1024")
        b = c.encode(x)                 # 1-D uint8 tensor, the bytes that would travel
        y = c.decode(b, x.numel())      # 1-D float32 tensor
        z = c.roundtrip(x)              # decode(encode(x)) in x's shape and dtype
        c.decode(b, y.numel(), out=y)   # into given memory: encode and roundtrip take out= too

    This version has these codecs, where b is 1 to 8 bits:

    * ``none``: the elements themselves.
    * ``minmax<b>``: the nearest of 2**b evenly spaced values from each bucket's minimum to its maximum.
    * ``qsgd<b>``: the grid of ``minmax``, rounded at random without bias.
    * ``lattice<b>``: the nearest value of a grid that is shifted by one random number for each bucket.
    * ``sym<b>``, from 2 bits: a grid around 0 with a level at 0, up to each bucket's largest magnitude.
    * ``mid<b>``: a grid around 0 with levels half a step away from 0, up to each bucket's largest magnitude.
    * ``sign1``: plus or minus the mean magnitude, in 1 bit.
    * ``gauss<b>``: rotated elements on the 2**b values with the least error on a normal distribution, times the root mean
      square.
    * ``levels<b>``: your own levels between each bucket's minimum and maximum, given as ``table=`` to each call.
    * ``fp16``, ``bf16``: each element as the nearest number of that type; an element that is too large becomes the type's
      largest number.
    * ``topk:keep=0.2,values=sym8``: the share ``keep`` of the elements with the largest magnitude, in the named codec, with
      their places; the others decode to 0.
    * ``logbyte``, ``log9``: sign and logarithm in 8 or 9 bits, for numbers whose order of magnitude matters. The relative
      error is 6.5 % (``logbyte``) or 3.2 % (``log9``) within 4e-4 to 2.6e3; numbers beyond become the end of this range.
      NaN and infinities decode to NaN.

    Codecs with buckets have these options:

    * ``bucket``: a power of two from 64 to 65,536 elements (default 1024, for ``gauss`` 512), or ``bucket=tensor`` for one
      bucket for the whole tensor (not with a rotation).
    * ``axis=channel`` in place of ``bucket``: a scale for each index in the last dimension, which may have 1 to 65,536
      indices (not with a rotation, not for ``levels``).
    * ``range=l2`` (``sym``, ``mid``): up to twice the root mean square instead of the largest magnitude.
    * ``meta=bf16`` (not for ``lattice``): a bucket's metadata in bfloat16. They take half the bytes, and the
      step is up to 1/128 larger, or more where all values are far from 0. ``gauss`` has it unless ``meta=fp32``.
    * ``rotate=1`` (bucket 512 or more; not for ``levels``; ``gauss`` always rotates): blocks of 512 elements are rotated
      before encoding and back after decoding. The elements of any tensor become nearly normal, so that outliers do not set a
      bucket's step.
    * ``gain`` (``gauss``): a factor on decoded values, whose norm is smaller than the original's (1.13 restores it at 2 bits).
    * ``nonfinite=error`` (default): NaN, infinities and magnitudes of 2**126 and more (2**120 with a rotation) are an error.
      ``poison`` sends a bucket that decodes to NaN. Casts and ``topk`` have this option too: a cast takes any finite
      element, and poisons the one element only.

    A bucket's step is (max - min) / (2**b - 1); for ``sym`` and ``mid`` it is the largest magnitude / 2**(b - 1). An
    element's error is at most half a step, or a whole step with ``qsgd`` and for the largest elements with ``sym``. A
    payload has b bits an element and 8 bytes a bucket (4 bytes for the codecs around 0 and ``gauss``);
    ``meta=bf16`` halves the bytes a bucket.

    Nearest values for weights and stochastic ones for gradients are the method of QSDP: Markov, Vladu, Guo, Alistarh,
    "Quantized Distributed Training of Large Models with Convergence Guarantees", ICML 2023.

    Args:
        spec: ``name<bits>:key=value,...``, for example ``"minmax8:bucket=1024"`` or ``"qsgd4"``.

    Returns:
        A stateless codec, safe to use from several threads. Its bytes are the same on every machine.

    Raises:
        TypeError: `spec` is no text.
        ValueError: The text does not name a codec, or has an option or value that this version does not have.

    A codec that is too coarse for its bucket (1 or 2 bits, 512 elements and more) logs a warning with the measured errors.
    """
    if not isinstance(spec, str):
        raise TypeError(f'codec: expected a text such as "minmax8:bucket=1024", got {spec!r}')
    made = Codec(spec)
    caution(made.spec)
    return made
