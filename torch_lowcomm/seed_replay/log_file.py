"""A log of records in a file, with their checksum beside it: what a crash cut off is dropped, what was damaged is refused."""

import struct
from pathlib import Path

from torch_lowcomm import _C
from torch_lowcomm._checksum import bytes_checksum
from torch_lowcomm._log import logger

_ENTRY = struct.Struct("<QI")  # bytes of the log so far, and their CRC-32C


class LogFile:
    """The file `<name>.bin` of records, one behind another, and `<name>.crc`, an entry for each append.

    A process may be killed between two writes: records come before their entry, and need none.

    Args:
        path: Of the records.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._sums = path, path.with_suffix(".crc")
        self._bytes = self._crc = 0

    def read(self) -> bytes:
        """Returns the records that are whole; what follows them is dropped, with a warning.

        Raises:
            ValueError: Others were written.
        """
        records = self._path.read_bytes() if self._path.exists() else b""
        sums = self._sums.read_bytes() if self._sums.exists() else b""
        whole_entries = _ENTRY.iter_unpack(sums[: len(sums) // _ENTRY.size * _ENTRY.size])
        entries = [entry for entry in whole_entries if entry[0] <= len(records)]
        if entries and (got := bytes_checksum(records[: entries[-1][0]])) != entries[-1][1]:
            raise ValueError(
                f"SeedReplay: {self._path}: expected {entries[-1][0]} bytes with CRC-32C {entries[-1][1]:08x}, as they were "
                f"written, got {got:08x}: the file is damaged"
            )
        whole = _C.ReplayRecords(records).whole_prefix
        if len(whole) < len(records):
            logger.warning("%s: dropped %d bytes of a record that was not whole", self._path, len(records) - len(whole))
            _replace(self._path, whole)
        self._bytes, self._crc = len(whole), bytes_checksum(whole)
        _replace(self._sums, _ENTRY.pack(self._bytes, self._crc))
        return whole

    def append(self, records: bytes) -> None:
        """Writes records, then their entry."""
        self._bytes, self._crc = self._bytes + len(records), bytes_checksum(records, self._crc)
        for path, data in ((self._path, records), (self._sums, _ENTRY.pack(self._bytes, self._crc))):
            with path.open("ab") as file:
                file.write(data)

    def remove(self) -> None:
        """Deletes both files where they exist."""
        for path in (self._path, self._sums):
            path.unlink(missing_ok=True)


def _replace(path: Path, data: bytes) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.write_bytes(data)
    part.rename(path)
