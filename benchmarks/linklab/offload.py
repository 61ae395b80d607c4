"""Turns a device's segmentation and checksum offload off, so that what crosses it are frames as a wire has them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading

from linklab.errors import LabError

_CLONE_NEWNET = 0x40000000
# linux/ethtool.h: a command and a value, passed by an ioctl with the device's name.
_SIOCETHTOOL = 0x8946
_OFF = {"checksums": 0x17, "scatter-gather": 0x19, "TSO": 0x1F, "GSO": 0x24, "GRO": 0x2C}


def turn_off(namespace: str, device: str) -> None:
    """Does it to a device of a namespace. LabError when the kernel refuses."""
    # In a thread: a thread enters a namespace by itself, and this one ends there.
    problems: list[str] = []
    worker = threading.Thread(target=_turn_off, args=(namespace, device, problems))
    worker.start()
    worker.join()
    if problems:
        raise LabError(f"{namespace}: turning offload of {device} off: {problems[0]}")


def _turn_off(namespace: str, device: str, problems: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with open(f"/run/netns/{namespace}") as file:  # noqa: PTH123 - what `ip netns` names, no file of a user's
            if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for number in _OFF.values():
                value = ctypes.create_string_buffer(struct.pack("II", number, 0))
                fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(value)))
    except OSError as error:
        problems.append(str(error))
