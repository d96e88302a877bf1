"""Writing a segment of any size.

Rules of this module:

- What is written is sent in parts as it comes, so that memory holds one part. A segment of less than a part is sent
  whole, at its end.
- Nothing refers to a segment before all of it is stored. What is given up is aborted: no listing shows an object that
  was sent in part.
"""

from __future__ import annotations

from typing import Any

from lsm.format.names import make_ulid, segment_key
from lsm.format.segment import SegmentInfo, SegmentWriter
from lsm.process import Process
from lsm.steps import AbortUpload, FinishUpload, OpenUpload, Steps, UploadPart
from lsm.upload import upload

_PART = 8 << 20


class Output:
    """A segment that is being written.

    Args:
        process: The process.
        thread_id: The thread that it is for.
        incarnation: That thread's.
        base: What its records' numbers are counted from.
        now: The time, in seconds since the epoch.
        values: Whether it is for large values.

    Attributes:
        writer: Takes what is written.
    """

    def __init__(self, process: Process, thread_id: str, incarnation: bytes, base: int, now: float, values: bool):
        name = make_ulid(now, incarnation, process.entropy(6))
        self.writer = SegmentWriter(name, process.compression, base, values, called=int(values))
        self._key = segment_key(thread_id, name)
        self._handle: Any = None
        self._parts: list[bytes] = []
        self._size = 0

    def pump(self) -> Steps[None]:
        """Send what is ready, if it is enough."""
        part = self.writer.take()
        self._parts.append(part)
        self._size += len(part)
        if self._size >= _PART:
            if self._handle is None:
                self._handle = yield OpenUpload(self._key)
            yield UploadPart(self._handle, b"".join(self._parts))
            self._parts, self._size = [], 0

    def finish(self) -> Steps[SegmentInfo]:
        """Store all of it."""
        info = self.writer.finish()
        rest = b"".join([*self._parts, self.writer.take()])
        if self._handle is None:
            yield from upload(self._key, rest)
        else:
            yield UploadPart(self._handle, rest)
            yield FinishUpload(self._handle)
        return info

    def abort(self) -> Steps[None]:
        """Give up what was sent."""
        if self._handle is not None:
            yield AbortUpload(self._handle)
