"""How what a rewrite made takes its place in the manifest.

Rules of this module:

- One conditional write swaps the directory: until it succeeds nothing refers to the new segments, and after it nobody
  who reads the manifest sees the old ones. An ambiguous answer is settled by reading the manifest again.
- Commits that came meanwhile stay: their frames follow the new header. Where they build on something that a keep-rule
  has dropped, the rewrite is `Outdated` and begins again. Segments that they borrow from stay in the directory.
- The header's heads are read anew from the segments, so that what it carries always says where things are now, and
  hands it on to what comes after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from lsm.errors import LSMError
from lsm.fetch import load_runs
from lsm.find import Gathering, Scan
from lsm.flush import build_header, rebased
from lsm.format.manifest import Header, pack_header
from lsm.format.names import segment_key
from lsm.format.records import HIDDEN, Blob, Checkpoint, Place, Record, Writes, version_key
from lsm.format.segment import Run, SegmentInfo, rows_of
from lsm.limits import HEADER, MANIFEST
from lsm.process import Process, Thread, refresh
from lsm.rewrite import Rewritten
from lsm.steps import Now, PutIf, Steps
from lsm.turn import confirm, until_stored
from lsm.values import Materials
from lsm.view import BlobKey, CheckpointKey, View, assemble, is_later

logger = logging.getLogger("lsm")

_MOST_RETIRED = 256


class Outdated(LSMError):
    """The thread has changed in a way that a rewrite must take into account: it begins again."""


class Crowded(Outdated):
    """The frames must become a segment before the rewrite begins again."""


def swap(process: Process, thread: Thread, made: Rewritten) -> Steps[None]:
    """Put the segments that a rewrite made in the place of its inputs.

    Raises:
        Outdated: If an input has gone meanwhile, or new records build on what was dropped.
        CommitTimeout: If other writers or the store kept it from succeeding.
    """

    def change(view: View | None, now: float) -> Steps[Header]:
        if view is None:
            raise Outdated("the thread was deleted")
        present = {info.ulid for info in view.header.segments}
        if not made.inputs <= present:
            raise Outdated("another rewrite was faster")
        if made.dropped or made.unlinked:
            yield from _check_foundations(process, thread, view, made)
        lenders = yield from _lenders(process, thread, view, made)
        return _swapped(process, view.header, view.next_number, made, now, lenders=lenders)

    yield from _store(process, thread, made, change)


def graft(process: Process, thread: Thread, made: Rewritten) -> Steps[None]:
    """Add segments to a thread: what it has itself is the newer.

    Raises:
        CommitTimeout: If other writers or the store kept it from succeeding.
    """

    def change(view: View | None, now: float) -> Steps[Header]:
        yield from ()
        if view is None or view.incarnation != made.incarnation:
            raise Outdated("the thread to copy to was made anew")
        if any(info.base <= added.base for info in view.header.segments for added in made.segments):
            raise Outdated("another copy was faster")
        return _swapped(process, view.header, view.next_number, made, now, int(now * 1000))

    yield from _store(process, thread, made, change)


def _swapped(
    process: Process,
    header: Header,
    number: int,
    made: Rewritten,
    now: float,
    changed: int = 0,
    lenders: Collection[str] = (),
) -> Header:
    """The header after the swap; the new segments get numbers from `number` on, which no frame has used."""
    added: list[SegmentInfo] = []
    for info in made.segments:
        companion = added[-1].number if added else 0
        added.append(replace(info, number=number, companion=companion))
        number += 1
    gone = [
        info.ulid
        for info in header.segments
        if (info.ulid in made.inputs or made.live.get(info.ulid) == 0) and info.ulid not in lenders
    ]
    staying = [
        replace(info, live=made.live.get(info.ulid, info.live)) for info in header.segments if info.ulid not in gone
    ]
    recently = now - process.limits.grace
    retired = [(ulid, at) for ulid, at in header.retired if at >= recently] + [(ulid, int(now)) for ulid in gone]
    segments = sorted([*staying, *added], key=lambda info: (info.top, info.number))
    return replace(
        header,
        segments=tuple(segments),
        next_number=number,
        retired=tuple(retired[-_MOST_RETIRED:]),
        carried=(),
        inline={},
        heads=(),
        peaks=(),
        partial=(),
        changed=max(header.changed, changed),
    )


def _store(
    process: Process, thread: Thread, made: Rewritten, change: Callable[[View | None, float], Steps[Header]]
) -> Steps[None]:
    ours = {info.ulid for info in made.segments}
    sent = False

    def attempt(lock: Any) -> Steps[None]:
        nonlocal sent
        view = yield from refresh(process, thread)
        if sent and view is not None and ours and ours <= {info.ulid for info in view.header.segments}:
            yield from confirm(process, thread, view, lock)
            return
        if view is not None and view.header.fence != made.fence:
            raise Outdated("a collector may have taken what was made for an orphan")
        header = yield from change(view, (yield Now()))
        whole = bool(made.peaks) and (view is None or made.inputs >= _log_names(view))
        after = yield from _carry(process, thread, view, header, made, whole)
        body = b"".join(after.parts())
        sent = True
        tag = yield PutIf(thread.key, body, view.tag if view is not None else None, lock)
        process.adopt(thread, replace(after, tag=tag))
        logger.debug("thread %r: %d segments replaced by %d", thread.id, len(made.inputs), len(made.segments))

    yield from until_stored(process, thread, attempt, "a rewrite", "what it made is left to the collector")


def _log_names(view: View) -> set[str]:
    return {info.ulid for info in view.header.segments if not info.values}


# What later records build on.


def _lenders(process: Process, thread: Thread, view: View, made: Rewritten) -> Steps[set[str]]:
    """The names of the segments that nothing rewritten refers to any more, but a newer blob that borrows from them."""
    left = {
        info.number: info.ulid
        for info in view.header.segments
        if info.values and (info.ulid in made.inputs or made.live.get(info.ulid) == 0)
    }
    if not left:
        return set()
    flushed = [info for info in view.header.segments if not info.values and info.base >= made.seq]
    records = yield from _records(process, thread, [(info, run) for info in flushed for run in info.blob_index.runs])
    records += [blob for blobs in list(view.tail.blobs.values()) for blob in blobs if blob.seq > view.header.seq]
    borrowed = [place for record in records if isinstance(record, Blob) for place in record.borrowed]
    return {left[place.segment] for place in borrowed if place.segment in left}


def _records(process: Process, thread: Thread, runs: Sequence[tuple[SegmentInfo, Run]]) -> Steps[list[Record]]:
    """The records of some runs of pages."""
    loaded = yield from load_runs(process, thread, runs)
    records: list[Record] = []
    for (info, _), pages in zip(runs, loaded, strict=True):
        records += [record for _, record in rows_of(pages, info, segment_key(thread.id, info.ulid))]
    return records


def _check_foundations(process: Process, thread: Thread, view: View, made: Rewritten) -> Steps[None]:
    """See that nothing newer than the inputs builds on what was dropped.

    Checkpoints tell: a patch builds on a version of its checkpoint's parent, which is gone only where the parent is, or
    where a newer record of the parent has that version.
    """
    newer = [info for info in view.header.segments if info.ulid not in made.inputs and not info.values]
    wanted = [(info, run) for info in newer for run in (*info.checkpoint_index.runs, *info.blob_index.runs)]
    records = yield from _records(process, thread, wanted)
    seq = view.header.seq
    for by_id in list(view.tail.checkpoints.values()):
        records += [each for found in list(by_id.values()) for each in found if each.seq > seq]
    for blobs in list(view.tail.blobs.values()):
        records += [blob for blob in blobs if blob.seq > seq]
    own: set[BlobKey] = set()
    present: set[CheckpointKey] = set()
    for record in records:
        if isinstance(record, Blob):
            own.add((record.namespace, record.channel, version_key(record.version)))
        elif isinstance(record, Checkpoint):
            present.add((record.namespace, record.id))
    for record in records:
        if not isinstance(record, Checkpoint):
            continue
        if record.parent is not None:
            parent = record.namespace, record.parent
            if parent in made.unlinked and parent not in present:
                raise Outdated(f"checkpoint {record.id!r} goes on from {record.parent!r}, which was dropped")
        for channel, version in record.versions.items() if made.dropped else ():
            key = record.namespace, channel, version_key(version)
            if key in made.dropped and key not in own:
                raise Outdated(f"checkpoint {record.id!r} has version {version!r} of {channel!r}, which was dropped")


# What the header carries.


def _carry(
    process: Process, thread: Thread, view: View | None, header: Header, made: Rewritten, whole: bool
) -> Steps[View]:
    """The view that begins with a header, with what it should carry, followed by the frames of the view before."""
    flushed = assemble(thread.key, header, b"", (), None)
    frames = view.tail.frames[: view.count] if view is not None else []
    old = view.header if view is not None else None
    namespaces = {"", *(namespace for namespace, _ in (old.heads if old else ()))}
    if not whole:
        namespaces &= {namespace for namespace, _ in (old.heads if old else ())}
    parents, bases, strays = _anchors(view)
    carried: list[Record] = []
    heads: list[tuple[str, str]] = []
    for namespace in sorted(namespaces):
        found = yield from Scan(process, thread, flushed, namespace).next(1)
        if found:
            heads.append((namespace, found[0].checkpoint.id))
            carried += [found[0].checkpoint, *found[0].writes]
    known = {(record.namespace, record.id) for record in carried if isinstance(record, Checkpoint)}
    carried += yield from _rows_at(process, thread, flushed, [key for key in parents if key not in known], strays)
    carried = yield from _with_tables(process, thread, flushed, carried)
    bodies = yield from _bases(process, thread, flushed, bases)
    peaks = dict(made.peaks)
    if view is not None:
        for channel, version in list(view.tail.peaks.items()):
            if channel not in peaks or (not whole and is_later(version, peaks[channel])):
                peaks[channel] = version
    spaces = {namespace for namespace, _ in heads}
    full = replace(
        header,
        carried=(*carried, *bodies),
        heads=tuple(heads),
        peaks=tuple((*channel, version) for channel, version in peaks.items() if channel[0] in spaces),
        stray=made.stray or (header.stray and not whole),
    )
    full = replace(full, inline=(yield from _small_values(process, thread, flushed, carried, process.limits.small)))
    chosen = assemble(thread.key, full, b"", (), None)
    slim = build_header(
        replace(full, carried=(), heads=(), peaks=(), inline={}),
        chosen,
        process.limits,
        process.compression,
        parents,
        bodies,
        lambda value, record: value,  # type: ignore[arg-type,return-value]
    )
    after = assemble(thread.key, slim, pack_header(slim, process.compression), (), view.tag if view else None)
    if frames:
        after = rebased(after, slim, process.compression, frames, slim.seq)
    if len(after.header_bytes) > HEADER or after.size > MANIFEST:
        raise Crowded("what the thread's last commits build on leaves no room for them beside the new header")
    return after


def _anchors(view: View | None) -> tuple[list[CheckpointKey], set[BlobKey], list[CheckpointKey]]:
    """What the frames of a view build on: parents, bases of patches; and the writes whose checkpoint may still come."""
    if view is None:
        return [], set(), []
    seq = view.header.seq
    parents = {
        (each.namespace, each.parent)
        for by_id in list(view.tail.checkpoints.values())
        for found in list(by_id.values())
        for each in found
        if each.seq > seq and each.parent is not None
    }
    bases = {
        (blob.namespace, blob.channel, version_key(blob.extends))
        for found in list(view.tail.blobs.values())
        for blob in found
        if blob.seq > seq and blob.extends is not None
    }
    strays = [
        (each.namespace, each.id)
        for each in view.header.carried
        if isinstance(each, Writes)
        # A checkpoint in a frame has come for those who read the frame: the header alone must still tell of its writes.
        and all(found.seq > seq for found in view.tail.checkpoints.get(each.namespace, {}).get(each.id, ()))
    ]
    return sorted(parents), bases, sorted(set(strays))


def _rows_at(
    process: Process, thread: Thread, flushed: View, parents: Iterable[CheckpointKey], strays: Iterable[CheckpointKey]
) -> Steps[list[Record]]:
    """The stubs, in segments, of some checkpoints, and of the writes of others."""
    parents, strays = list(parents), list(strays)
    wanted = [
        (info, run, key)
        for key in dict.fromkeys((*parents, *strays))
        for info in flushed.holders(key[0])
        for run in info.checkpoint_index.covering(key, key)
    ]
    loaded = yield from load_runs(process, thread, [(info, run) for info, run, _ in wanted])
    gathering = Gathering(thread, flushed)
    writes: list[Record] = []
    for (info, _, key), pages in zip(wanted, loaded, strict=True):
        for page in pages:
            for row in page.find(key):
                record = page.record(row, info, segment_key(thread.id, info.ulid))
                gathering.add(record)
                if isinstance(record, Writes) and key in strays:
                    writes.append(record)
    items = [item for key in parents if (item := gathering.walked(key)) is not None]
    return [*(item.checkpoint for item in items), *writes]


def _with_tables(process: Process, thread: Thread, flushed: View, records: Sequence[Record]) -> Steps[list[Record]]:
    """The records; checkpoints that were flushed during the rewrite, and say where values were that it has moved, are
    told where these are: else their descendants would not know either, and look for them with every read."""
    stale = {
        (id(record), channel): (record.namespace, channel, version_key(record.versions[channel]))
        for record in records
        if isinstance(record, Checkpoint)
        for channel in record.table
        if flushed.hint(record, channel)[0] is None
    }
    if not stale:
        return list(records)
    materials = Materials(process, thread, flushed)
    yield from materials.look_up(set(stale.values()))
    made: list[Record] = []
    for record in records:
        if isinstance(record, Checkpoint):
            found = {channel: materials.pieces[key] for (at, channel), key in stale.items() if at == id(record)}
            record = replace(record, table=record.table | found)
        made.append(record)
    return made


def _bases(process: Process, thread: Thread, flushed: View, keys: set[BlobKey]) -> Steps[list[Blob]]:
    """The stubs, in segments, of the blobs that patches in frames are applied to."""
    materials = Materials(process, thread, flushed)
    blobs = yield from materials.blobs_at(keys)
    return list(blobs.values())


def _small_values(
    process: Process, thread: Thread, flushed: View, carried: Iterable[Record], most: int
) -> Steps[dict[Place, bytes]]:
    """The values of the root's head, if they are small together."""
    places: list[Place] = []
    for record in carried:
        if record.namespace != "":
            continue
        if isinstance(record.value, Place):
            places.append(record.value)
        if isinstance(record, Checkpoint):
            if record.flags & HIDDEN:
                return {}
            for channel in record.versions:
                pieces = flushed.pieces(record, channel)
                if pieces is None:  # a hint that has become stale, as any of a segment flushed during the rewrite may
                    return {}
                places += [piece for piece in pieces if isinstance(piece, Place)]
    if sum(place.length for place in places) > most:
        return {}
    materials = Materials(process, thread, flushed)
    yield from materials.collect(places)
    return {place: materials.value(place) for place in places}
