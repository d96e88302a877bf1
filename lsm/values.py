"""What the values are: where they lie, and how they are put together.

Rules of this module:

- A checkpoint's table is a hint: it is followed while its segments are there. Where something newer may have replaced
  the value, the indexes that tell are read beside the data. Where a hint leads nowhere, the blob is looked up by its
  key, which is the truth.
- It is settled where everything lies, then all of it is read in one round.
- A patch is applied to the very blob that it was made from, also where that has been replaced meanwhile.
- Bytes that fail their checksum are an error, also where something else could have answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lsm.errors import CorruptionError
from lsm.fetch import load_blocks, load_runs
from lsm.format.names import segment_key
from lsm.format.patch import MAX_LINKS, MAX_PIECES
from lsm.format.records import Blob, Checkpoint, Piece, Pieces, Place, Typed, unpack_pieces, version_key
from lsm.format.segment import SegmentInfo
from lsm.process import Known, Process, Thread
from lsm.steps import All, Steps, results
from lsm.view import BlobKey, View

_MOST_LOOKS = 4 * MAX_LINKS  # versions that were stored again have chains of their own
_SLACK = 1 << 20


class Materials:
    """All that some items need: where it is is settled first, then it is read in one round."""

    def __init__(self, process: Process, thread: Thread, view: View):
        self.process = process
        self.thread = thread
        self.view = view
        self.pieces: dict[BlobKey, Pieces] = {}
        self._blocks: dict[tuple[int, int], bytes] = {}
        self._known: dict[BlobKey, Known] = {}
        self._doubts: dict[BlobKey, tuple[int, list[SegmentInfo]]] = {}

    def settle(self, wanted: Iterable[tuple[Checkpoint, Sequence[str]]]) -> Steps[None]:
        """Find out where the values of channels are. Hints that are in doubt stay so until `collect`."""
        unknown = set()
        for checkpoint, channels in wanted:
            for channel in channels:
                key = checkpoint.namespace, channel, version_key(checkpoint.versions[channel])
                if key in self.pieces:
                    continue
                pieces, doubts = self.view.hint(checkpoint, channel)
                if pieces is None or (doubts and not pieces):
                    unknown.add(key)
                    continue
                self.pieces[key] = pieces
                if doubts:
                    self._doubts[key] = checkpoint.seq, doubts
        if unknown:
            yield from self.look_up(unknown)

    def look_up(self, keys: Iterable[BlobKey], seq: int | None = None) -> Steps[None]:
        """Find blobs by their keys, as they were after a commit, or are now; a patch whose base has moved needs its
        base, and so on."""
        blobs: dict[BlobKey, list[Blob]] = {}
        wanted = set(keys)
        for _ in range(_MOST_LOOKS):
            if not wanted:
                break
            yield from self._find_blobs(dict.fromkeys(wanted, self.view.segments()), blobs)
            wanted = {
                base
                for found in list(blobs.values())
                for blob in found
                if (base := self._base(blob)) is not None and base not in blobs
            }
        if wanted:
            raise self._endless(min(wanted))
        for key in keys:
            self.pieces[key] = self._chain(key, blobs, seq)

    def blobs_at(self, keys: Iterable[BlobKey]) -> Steps[dict[BlobKey, Blob]]:
        """The newest blobs of some keys, as far as there are any, each with its base."""
        keys = set(keys)
        yield from self.look_up(keys)
        found: dict[BlobKey, list[Blob]] = {}
        yield from self._find_blobs(dict.fromkeys(keys, self.view.segments()), found)
        newest = {key: blobs[-1] for key, blobs in found.items() if blobs}
        return {key: replace(blob, base=self.pieces[key][: -len(blob.own)]) for key, blob in newest.items()}

    def _find_blobs(
        self, keys: Mapping[BlobKey, Sequence[SegmentInfo]], blobs: dict[BlobKey, list[Blob]]
    ) -> Steps[None]:
        """Add all records of some keys that are at hand or in some segments, in order of commit."""
        wanted = [
            (info, run, key)
            for key, infos in sorted(keys.items(), key=lambda each: each[0])
            for info in infos
            for run in info.blob_index.covering(key, key)
        ]
        runs = {(info.ulid, run.offset): (info, run) for info, run, _ in wanted}
        loaded = yield from load_runs(self.process, self.thread, list(runs.values()))
        pages_of = dict(zip(runs, loaded, strict=True))
        for key in keys:
            at_hand = self.view.blob(key)
            blobs[key] = [] if at_hand is None else [at_hand]
        for info, run, key in wanted:
            where = segment_key(self.thread.id, info.ulid)
            for page in pages_of[info.ulid, run.offset]:
                found = [page.record(row, info, where) for row in page.find(key)]
                blobs[key] += [blob for blob in found if isinstance(blob, Blob)]
        for key in keys:
            blobs[key].sort(key=lambda blob: blob.seq)

    def _base(self, blob: Blob) -> BlobKey | None:
        """The key of what a patch is applied to, if it takes a look-up to know where that is."""
        if blob.extends is None or (blob.pieces is not None and self.view.alive(blob.pieces)):
            return None
        return blob.namespace, blob.channel, version_key(blob.extends)

    def _chain(self, key: BlobKey, blobs: dict[BlobKey, list[Blob]], seq: int | None = None) -> Pieces:
        """The pieces of the value of a key: of its newest blob, up to a commit, then of the one that was the newest
        when that was made, and so on."""
        pieces: list[Piece] = []
        link: Blob | None = None
        for _ in range(MAX_LINKS):
            found = [blob for blob in blobs[key] if seq is None or blob.seq <= seq]
            blob = found[-1] if found else None
            base = None if blob is None else self._base(blob)
            if blob is not None and base is not None and not blob.empty:
                pieces += reversed(blob.own)
                key, link, seq = base, blob, blob.seq
                continue
            whole = (blob.pieces or ()) if blob is not None else ()
            if link is not None and not whole:
                raise CorruptionError(
                    f"thread {self.thread.id!r}: channel {link.channel!r} of namespace {link.namespace!r} at version "
                    f"{link.version!r} is a patch on version {link.extends!r}, which is missing in {self.thread.key}"
                )
            if len(whole) + len(pieces) > MAX_PIECES:
                break
            return (*whole, *reversed(pieces))
        raise self._endless(key)

    def _endless(self, key: BlobKey) -> CorruptionError:
        return CorruptionError(
            f"thread {self.thread.id!r}: channel {key[1]!r} of namespace {key[0]!r} is a chain of patches without end, "
            f"according to the segments of {self.thread.key}; restore them from a backup"
        )

    def admit(self, places: Iterable[Place]) -> None:
        """See that what is put together is no more than the segments have.

        A byte is in one value, or in what a task wrote and in the value that borrows it.

        Raises:
            CorruptionError: If it is more.
        """
        size = sum([place.length for place in places])
        most = 2 * sum([info.raw for info in self.view.segments()]) + _SLACK
        if size > most:
            raise CorruptionError(
                f"thread {self.thread.id!r}: the values of a checkpoint have {size:,} bytes together, more than all "
                f"segments that {self.thread.key} names; restore it from a backup"
            )

    def collect(self, places: Iterable[Place]) -> Steps[None]:
        """Read the blocks of some places, in one round for all that are not cached; hints in doubt are checked beside.
        What takes the place of one that was wrong takes another round."""
        doubts, self._doubts = self._doubts, {}
        if not doubts:
            yield from self._read(places)
            return
        _, replaced = results((yield All([self._read(places), self._check(doubts)])))
        yield from self._read([place for key in replaced for place in self.places(key)])

    def _check(self, doubts: Mapping[BlobKey, tuple[int, list[SegmentInfo]]]) -> Steps[list[BlobKey]]:
        """Put what is newer in the place of hints. Returns the keys for which there was something."""
        blobs: dict[BlobKey, list[Blob]] = {}
        yield from self._find_blobs({key: infos for key, (_, infos) in doubts.items()}, blobs)
        replaced = [key for key, (seq, _) in doubts.items() if blobs[key] and blobs[key][-1].seq > seq]
        moved = [key for key in replaced if self._base(blobs[key][-1]) is not None]
        for key in replaced:
            self._known.pop(key, None)
            if key not in moved:
                self.pieces[key] = self._chain(key, blobs)
        if moved:
            yield from self.look_up(moved)
        return replaced

    def _read(self, places: Iterable[Place]) -> Steps[None]:
        wanted: dict[tuple[int, int], int] = {}
        for place in places:
            at = place.segment, place.offset
            if at not in self._blocks and place not in self.view.header.inline:
                wanted[at] = place.stored
        blocks = [(self._info(number), offset, stored) for (number, offset), stored in wanted.items()]
        self._blocks.update((yield from load_blocks(self.process, self.thread, blocks)))

    def _info(self, number: int) -> SegmentInfo:
        info = self.view.segment(number)
        if info is None:
            raise CorruptionError(
                f"thread {self.thread.id!r}: manifest {self.thread.key} refers to segment number {number}, "
                "which its directory does not have"
            )
        return info

    def value(self, value: bytes | Place) -> bytes:
        """A value that is at hand or was collected."""
        if isinstance(value, bytes):
            return value
        if (inline := self.view.header.inline.get(value)) is not None:
            return inline
        block = self._blocks[value.segment, value.offset]
        if value.start + value.length > len(block):
            raise CorruptionError(f"{self.where(value)}: a value lies outside of its block")
        return block[value.start : value.start + value.length]

    def where(self, value: bytes | Place | Blob) -> str:
        """The object that a value lies in, for errors."""
        if isinstance(value, Place):
            return segment_key(self.thread.id, self._info(value.segment).ulid)
        return self.thread.key

    def channel(self, key: BlobKey) -> Typed | None:
        """The value of a channel, or `None` where it has none."""
        known = self.known(key)
        if known is not None:
            return known[0]
        pieces = self.pieces[key]
        if not pieces:
            return None
        parts = [self.value(piece.value if isinstance(piece, Blob) else piece) for piece in pieces]
        value, links = unpack_pieces(parts, self.where(pieces[-1]))
        cost = len(value[1]) + 100 * len(links) + 300
        self.process.cache.put(self.process.value_key(self.view, pieces[-1]), (value, links), cost)
        return value

    def known(self, key: BlobKey) -> Known | None:
        """The value of a channel and its chain, if they are cached, or were when this was asked before."""
        pieces = self.pieces[key]
        if not pieces or key in self._known:
            return self._known.get(key)
        found: Known | None = self.process.cache.get(self.process.value_key(self.view, pieces[-1]))
        if found is not None:
            self._known[key] = found
        return found

    def places(self, key: BlobKey) -> list[Place]:
        """What must be collected before `channel` can answer."""
        if self.known(key) is not None:
            return []
        return [place for piece in self.pieces[key] if (place := _place_of(piece)) is not None]


def _place_of(piece: Piece) -> Place | None:
    if isinstance(piece, Place):
        return piece
    return piece.value if isinstance(piece.value, Place) else None
