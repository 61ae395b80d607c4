"""A second reader of the wire format, written from `csrc/wire/FORMAT.md` alone, in numpy.

It shares no line with the library: where both read the same bytes as the same numbers, the page says enough.
"""

from format_reader.decode import decode, encoded_bytes
from format_reader.frame import Header, codec_of, crc32c, read_frame
from format_reader.refusal import Refusal
from format_reader.spec import Spec, parse

__all__ = ["Header", "Refusal", "Spec", "codec_of", "crc32c", "decode", "encoded_bytes", "parse", "read_frame"]
