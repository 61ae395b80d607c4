"""What pickle and deepcopy make of the package's objects: codecs and options are copied, what belongs to a group is not."""

import copyreg
from typing import Any

from torch_lowcomm._C import Codec, Options

FIELDS = (
    "policy",
    "min_bytes",
    "timeout",
    "seed",
    "chunk_bytes",
    "connections",
    "flight_record",
    "encode_on_device",
    "nccl",
)


class NotCopied:
    """An object with parts outside of Python or of this process, which a copy would not have: pickle, `torch.save` and deepcopy
    are TypeErrors, with what does it in their place.
    """

    _instead = "save its state_dict() and load that into a new one"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__}: pickle and deepcopy cannot copy it, for parts of it are outside of Python or of this "
            f"process: {self._instead}"
        )


def _options(fields: dict[str, Any]) -> Options:
    return Options(**fields)


copyreg.pickle(Codec, lambda codec: (Codec, (codec.spec,)))
copyreg.pickle(Options, lambda options: (_options, ({name: getattr(options, name) for name in FIELDS},)))
