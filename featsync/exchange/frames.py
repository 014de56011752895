"""Messages between the engines of two ranks: a few words as JSON, then numbers as they are.

::

    4 bytes    magic, and the version of what follows
    4 bytes    length of the words      uint32
    8 bytes    length of the numbers    uint64
               words                    a JSON object, with a "kind"
               numbers

A `FrameReader` takes them from a socket that gives what it has and never waits.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featsync.errors import PeerError

__all__ = ["Frame", "FrameReader", "encode_frame"]

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"fsy1"
_MAX_WORDS = 1 << 24
_MAX_NUMBERS = 1 << 40
_ALIGNMENT = 16
_PORTION = 1 << 20  # read at once; a peer that sends without end must not keep others waiting


class Frame(NamedTuple):
    """One message.

    Attributes:
        words: What it says; ``words["kind"]`` tells what it is.
        numbers: ``(n,)``, the reader's own; begin at a multiple of 16 bytes.
        num_bytes: All that it took.
    """

    words: dict[str, Any]
    numbers: NDArray[np.uint8]
    num_bytes: int


def encode_frame(words: dict[str, Any], numbers: Sequence[NDArray[np.uint8]] = ()) -> bytes:
    """Make the bytes of a message."""
    text = json.dumps(words).encode()
    parts = [part.tobytes() for part in numbers]
    return b"".join([_HEADER.pack(_MAGIC, len(text), sum(map(len, parts))), text, *parts])


class FrameReader:
    """Puts messages together from what a socket gives.

    Args:
        source: Who is at the other end, for errors.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._buffer = bytearray(_HEADER.size)
        self._filled = 0
        self._text_bytes = self._skipped = 0
        self._in_header = True

    def read(self, connection: socket.socket) -> Iterator[Frame]:
        """Yield the messages that are complete; does not wait.

        Raises:
            EOFError: The other end was closed.
            PeerError: What came is no message of this version.
            OSError: The connection broke.
        """
        left = _PORTION
        while left > 0:
            try:
                view = memoryview(self._buffer)[self._filled :]
                count = connection.recv_into(view, min(len(view), left))
            except BlockingIOError:
                return
            if count == 0:
                raise EOFError(self._source)
            left -= count
            self._filled += count
            if self._filled == len(self._buffer) and (frame := self._complete()) is not None:
                yield frame

    def _complete(self) -> Frame | None:
        """Take what is in the buffer: a header, or all of a message."""
        buffer, self._filled = self._buffer, 0
        if self._in_header:
            magic, self._text_bytes, num_bytes = _HEADER.unpack(buffer)
            if magic != _MAGIC or self._text_bytes > _MAX_WORDS or num_bytes > _MAX_NUMBERS:
                raise PeerError(
                    f"{self._source} sent {bytes(buffer)!r} where a message of featsync begins. "
                    "All ranks need the same version of featsync.",
                    self._source,
                )
            self._in_header = False
            # So that the numbers begin where rows of any dtype can be used as they lie.
            self._filled = self._skipped = -self._text_bytes % _ALIGNMENT
            self._buffer = bytearray(self._skipped + self._text_bytes + num_bytes)
            return None
        self._in_header = True
        self._buffer = bytearray(_HEADER.size)
        end = self._skipped + self._text_bytes
        words = json.loads(bytes(buffer[self._skipped : end]))
        numbers = np.frombuffer(buffer, np.uint8)[end:]
        return Frame(words, numbers, _HEADER.size + len(buffer) - self._skipped)
