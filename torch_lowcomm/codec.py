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

    docs/codecs.md says what each codec and option does: ``minmax<b>``, ``qsgd<b>``, ``lattice<b>``, ``sym<b>``, ``mid<b>``,
    ``gauss<b>`` and ``levels<b>`` of 1 to 8 bits (``sym`` from 2), ``sign1``, ``topk``, ``fp16``, ``bf16``, ``logbyte``,
    ``log9`` and ``none``.

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
