"""What a reader may see, given what was asked and answered.

Rules of this module:

- A plain model, with none of the engine's notions: cells that have one value at a time. A checkpoint, a blob and a
  special write are cells in which the last call wins; in a regular write's the first does.
- Calls take time, so that only what surely came before counts: one call *precedes* another if it was over, or had been
  seen, before the other began. Of two that overlap, readers decide, once and for all: what a reader has seen, later
  readers see, or newer.
- A call that failed may have happened, but then as a whole.
- What a copy brings counts as stored by those who had stored it first (their *clones*), from when the copy begins.
  Where a thread has got something of its own, or by several copies, no order is expected.
- Clocks are off: what has expired for the one has not for the other. Only what has expired for all must be gone, and
  only what has for none must be there.
- Nothing here asks the engine or the store.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable
from dataclasses import replace
from math import inf
from typing import Any

from lsm.read import Stored
from tools.simulation.ledger import Cell, Ledger, Op
from tools.simulation.scenario import Scenario
from tools.simulation.world import Violation

GONE = None
EVERY_THREAD = "*"
REMOVALS = ("delete", "prune", "delete_runs", "expire")


class _History:
    """What is known of one cell."""

    __slots__ = ("first", "ops", "order")

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.order: set[tuple[Op, Op]] = set()
        self.first: Op | None = None

    @property
    def mixed(self) -> bool:
        """Whether a copy may have brought something beside what was there."""
        return len({op.about.get("copy") for op in self.ops}) > 1


class Oracle:
    """Judges what readers see.

    Args:
        ledger: The calls.
        scenario: What goes on.
        now: Tells the time.

    Attributes:
        spread: By how many seconds two clocks may differ.
    """

    def __init__(self, ledger: Ledger, scenario: Scenario, now: Callable[[], float]):
        self.ledger = ledger
        self.spread = max(0.0, *scenario.clocks) - min(0.0, *scenario.clocks)
        self._grace = scenario.limits.grace
        self._retention = scenario.retention
        self._now = now
        self._cells: dict[Cell, _History] = {}
        self._puts: dict[tuple[str, str], list[Op]] = {}
        self._written: dict[Cell, list[Cell]] = {}
        self._uids: dict[tuple[str, Any], Op] = {}
        self._removals: dict[Hashable, list[Op]] = {}
        self._sources: dict[str, set[str]] = {}
        self._stored: dict[str, list[Op]] = {}
        self._copies: dict[str, list[Op]] = {}
        self._clones: dict[tuple[Op, Op], Op] = {}

    # What is asked.

    def begin(self, op: Op) -> None:
        """A call begins."""
        self.ledger.begin(op)
        self.enter(op)

    def enter(self, op: Op) -> None:
        """Have a call counted."""
        for cell in op.cells:
            history = self._cells.get(cell)
            if history is None:
                history = self._cells[cell] = _History()
                if cell[0] == "w":
                    self._written.setdefault(cell[1:4], []).append(cell)
            history.ops.append(op)
        if op.kind == "put":
            self._puts.setdefault((op.thread, op.about["namespace"]), []).append(op)
            self._uids[op.thread, op.about["uid"]] = op
        elif op.kind in REMOVALS:
            self._removals.setdefault(op.thread, []).append(op)
        elif op.kind == "copy":
            target = op.about["target"]
            self._sources.setdefault(target, set()).update({op.thread, *self._sources.get(op.thread, ())})
            self._copies.setdefault(op.thread, []).append(op)
            for each in list(self._stored.get(op.thread, ())):
                self._clone(each, op)
        if op.cells:
            self._stored.setdefault(op.thread, []).append(op)
            for copy in self._copies.get(op.thread, ()):
                self._clone(op, copy)

    def _clone(self, op: Op, copy: Op) -> None:
        """What a call has stored, or is about to store, may be copied."""
        origin = op.about.get("origin", op)
        if (origin, copy) in self._clones or op.outcome == "refused":
            return
        cells = {(cell[0], copy.about["target"], *cell[2:]): value for cell, value in op.cells.items()}
        about = {**op.about, "origin": origin, "from": op, "copy": copy, "copied": inf, "exclusive": False}
        clone = replace(op, thread=copy.about["target"], cells=cells, about=about)
        clone.outcome, clone.known, clone.ended = "unknown", inf, inf
        self._clones[origin, copy] = clone
        self.begin(clone)

    def settle_copies(self) -> None:
        """All is quiet, and copies are over: it is known what there was to copy."""
        for (_, copy), clone in self._clones.items():
            op = clone.about["from"]
            owner: Cell = ("c", op.thread, op.about["namespace"], op.about["id"])
            if op.outcome == "refused":
                clone.outcome = "refused"
            elif copy.outcome == "acked" and self._certain(op, owner, copy.began):
                clone.outcome, clone.known = "acked", min(clone.known, copy.ended)
            clone.ended, clone.about["copied"] = op.ended, copy.ended
        self._clones.clear()
        self._copies.clear()

    def memory(self) -> bytes:
        """All that is known, for `recall`."""
        return pickle.dumps({name: value for name, value in vars(self).items() if name != "_now"})

    def recall(self, memory: bytes) -> None:
        """Know what was known, and nothing since."""
        vars(self).update(pickle.loads(memory))

    def power_cut(self) -> None:
        """What nobody was told may be lost after all, although somebody saw it."""
        for op in self.ledger.ops:
            if op.outcome != "acked":
                op.known = inf
        for history in self._cells.values():
            if any(op.outcome != "acked" for op in history.ops):
                history.order.clear()
                history.first = None

    # What may be gone.

    def _removals_on(self, thread: Hashable) -> list[Op]:
        return [*self._removals.get(thread, ()), *self._removals.get(EVERY_THREAD, ())]

    def _may_remove(self, removal: Op, cell: Cell) -> bool:
        """Whether a removal may remove a checkpoint."""
        if removal.kind == "delete":
            return True
        if removal.kind == "expire":
            return self._may_expire(cell, removal.began, removal.ended)
        if removal.kind == "delete_runs":
            return bool(self._of_its_run(removal, cell))
        newer = self._newer(cell)
        return ":" in str(cell[2]) or any(op.outcome != "refused" and op.began <= removal.ended for op in newer)

    def _must_remove(self, removal: Op, cell: Cell) -> bool:
        """Whether a removal that was acknowledged has removed a checkpoint."""
        if removal.kind == "delete":
            return True
        if removal.kind == "expire":
            return False
        if removal.kind == "delete_runs":
            ops = self._cells[cell].ops if cell in self._cells else []
            return bool(ops) and len(self._of_its_run(removal, cell)) == len(ops)
        return any(self._certain(op, _checkpoint_cell(op), removal.began) for op in self._newer(cell))

    def _of_its_run(self, removal: Op, cell: Cell) -> list[Op]:
        """The calls that put a checkpoint and were made by the run whose checkpoints are removed."""
        ops = self._cells[cell].ops if cell in self._cells else []
        return [op for op in ops if op.about.get("run") == removal.about["run"] and op.began <= removal.ended]

    def _newer(self, cell: Cell) -> list[Op]:
        """The calls that put checkpoints of higher ids in the namespace of one."""
        _, thread, namespace, id_ = cell
        return [op for op in self._puts.get((str(thread), str(namespace)), ()) if op.about["id"] > id_]

    def _may_expire(self, cell: Cell, began: float, ended: float) -> bool:
        """Whether somebody may find, between two times, that a checkpoint has expired."""
        retention, (_, thread, namespace, id_) = self._retention, cell
        if retention is None:
            return False
        ended += self.spread
        if retention.idle is not None:
            active = [op.began for op in self._stored.get(str(thread), ()) if op.known <= began]
            if max(active, default=-inf) + retention.idle.total_seconds() <= ended:
                return True
        puts = [op for op in self._puts.get((str(thread), str(namespace)), ()) if op.outcome != "refused"]
        newer = {op.about["id"] for op in puts if op.about["id"] > id_ and op.began <= ended}
        if ":" in str(namespace):
            return True  # with the root that it belongs to
        if retention.max_checkpoints is not None and len(newer) >= retention.max_checkpoints:
            return True
        if retention.max_age is None or not newer:
            return False
        oldest = min((op.began for op in puts if op.about["id"] == id_), default=inf)
        return oldest + retention.max_age.total_seconds() <= ended

    def _has_expired(self, cell: Cell, at: float) -> bool:
        """Whether a checkpoint has expired by a time for everybody."""
        retention, (_, thread, namespace, id_) = self._retention, cell
        if retention is None:
            return False
        at = min(at, self._now())
        if retention.idle is not None:
            active = [op.ended for op in self.ledger.ops if thread in (op.thread, op.about.get("target"))]
            if max(active, default=inf) + self.spread + retention.idle.total_seconds() < at:
                return True
        puts = self._puts.get((str(thread), str(namespace)), ())
        newer = {op.about["id"] for op in puts if op.about["id"] > id_ and self._certain(op, _checkpoint_cell(op), at)}
        if retention.max_checkpoints is not None and len(newer) >= retention.max_checkpoints:
            return True
        if retention.max_age is None or not newer:
            return False
        youngest = max((op.ended for op in puts if op.about["id"] == id_ and op.outcome != "refused"), default=inf)
        return youngest + self.spread + retention.max_age.total_seconds() < at

    def _unsure(self, op: Op, cell: Cell, at: float = inf) -> bool:
        """Whether what a call stored in a checkpoint's cell may have been removed since, be it before it was copied; or
        have expired, for who asked from a time on."""
        if self._may_expire(cell, min(at, self._now()), self._now()):
            return True
        copied = op.about.get("copied", 0.0)
        before = [each for source in self._sources.get(op.thread, ()) for each in self._removals_on(source)]
        for removal in [*self._removals_on(op.thread), *(each for each in before if each.began <= copied)]:
            if removal.outcome == "refused" or removal.ended <= op.began:
                continue
            if self._may_remove(removal, cell):
                return True
        return False

    def _certain(self, op: Op, cell: Cell, at: float) -> bool:
        """Whether a call had happened by a time for sure, and what it put into a checkpoint's cell is still there."""
        return op.known <= at and not self._unsure(op, cell, at)

    def check_refusals(self) -> None:
        """Of runs that refuse to overlap, each has gone on from the head as it was.

        Raises:
            Violation: If two went on from one head, or one from an older checkpoint.
        """
        for ops in self._puts.values():
            strict = [op for op in ops if op.about["exclusive"] and op.outcome == "acked"]
            for op in strict:
                id_, parent = op.about["id"], op.about["parent"] or ""
                for other in ops:
                    if other.about["id"] in (id_, parent) or other.about["id"] < parent:
                        continue
                    if self._certain(other, _checkpoint_cell(other), op.began):
                        raise Violation(f"{op} went on from {parent!r} although {other} had moved the thread on")
                    twins = other in strict and other.about["parent"] == op.about["parent"] and id_ > parent
                    if twins and not any(self._unsure(each, _checkpoint_cell(each)) for each in (op, other)):
                        raise Violation(f"{op} and {other} both went on from {parent!r}")

    # What is seen.

    def observe_checkpoint(self, thread: str, stored: Stored, began: float, ended: float) -> Op:
        """A reader that asked between two times saw a checkpoint.

        Returns:
            The call that stored it.

        Raises:
            Violation: If it must not have.
        """
        what = f"checkpoint {stored.id} of thread {thread}, namespace {stored.namespace!r}"
        op = self._uids.get((thread, stored.checkpoint))
        cell = "c", thread, stored.namespace, stored.id
        if op is None or cell not in op.cells:
            raise Violation(f"{what}: nobody stored {stored.checkpoint[1][:40]!r} there")
        if stored.metadata != op.about["metadata"] or stored.versions != op.about["versions"]:
            raise Violation(f"{what} is not as {op} stored it")
        self._observe(cell, cell, op.about["uid"], began, ended, what)
        if self._has_expired(cell, began):
            raise Violation(f"{what} is shown although it has expired")
        if stored.parent != op.about["parent"]:
            threads = (thread, *self._sources.get(thread, ()))  # a copy of what had lost its parent has none, either
            cells: list[Cell] = [("c", of, stored.namespace, op.about["parent"]) for of in threads]
            if stored.parent is not None or not any(self._may_be_gone(str(cell[1]), cell, ended) for cell in cells):
                raise Violation(f"{what} has parent {stored.parent!r} instead of {op.about['parent']!r}")
        for channel, version in op.about["versions"].items():
            self._observe_blob(op, thread, channel, version, stored.values.get(channel), (began, ended), what)
        extra = set(stored.values) - set(op.about["versions"])
        if extra:
            raise Violation(f"{what} has values for {sorted(extra)}, which it has no version of")
        self._observe_writes(op, cell, stored, (began, ended), what)
        return op

    def observe_absence(self, thread: str, namespace: str, id_: str, began: float, ended: float, how: str) -> None:
        """A reader did not find a checkpoint."""
        cell = "c", thread, namespace, id_
        self._observe(cell, cell, GONE, began, ended, f"checkpoint {id_} of thread {thread}, by {how}")

    def certain_checkpoints(self, thread: str, namespace: str | None, at: float) -> list[tuple[str, str]]:
        """The (namespace, id) of all checkpoints that must be found from a time on."""
        return [
            (space, op.about["id"])
            for (of, space), ops in self._puts.items()
            if of == thread and namespace in (None, space)
            for op in ops
            if self._certain(op, _checkpoint_cell(op), at)
        ]

    def checkpoint_ids(self, thread: str) -> list[tuple[str, str]]:
        """The (namespace, id) of all checkpoints that anybody tried to store."""
        found = {(space, op.about["id"]) for (of, space), ops in self._puts.items() if of == thread for op in ops}
        return sorted(found)

    def op_of(self, thread: str, stored: Stored) -> Op:
        """The call that stored a checkpoint that was observed."""
        return self._uids[thread, stored.checkpoint]

    def has_removals(self, thread: str) -> bool:
        """Whether anything of a thread, or of what was copied to it, may have been removed."""
        threads = {thread, *self._sources.get(thread, ())}
        return self._retention is not None or any(
            removal.outcome != "refused" for each in threads for removal in self._removals_on(each)
        )

    def hidden(self, child: Op, channel: str) -> tuple[Op, list[Any], Any] | None:
        """What a parent that is not seen any more contributes to a chain: its call, its writes on a channel, and its
        value. `None` where that cannot be told: it may have gone before its child came, for one."""
        thread, namespace, id_ = child.thread, child.about["namespace"], child.about["parent"]
        if any(self._base_may_be_gone(child, removal) for removal in self._removals_on(thread)):
            return None
        put = self._only(("c", thread, namespace, id_))
        if put is None or any(self._takes_all(each) for each in self._removals_on(thread)):
            return None
        writes = []
        for cell in self._written.get((thread, namespace, id_), ()):
            call = self._only(cell)
            if call is None or any(removal.began < call.ended for removal in self._removals_on(thread)):
                return None
            name, value, path = call.cells[cell]
            if name == channel:
                writes.append((path, *cell[-2:], value))
        blob: Cell = ("b", thread, namespace, channel, put.about["versions"].get(channel))
        seed = None
        if blob in self._cells:
            stored = self._only(blob)
            if stored is None:
                return None
            seed = None if stored.cells[blob] is EMPTY else stored.cells[blob]
        return put, [write[1:] for write in sorted(writes)], seed

    def _takes_all(self, removal: Op) -> bool:
        """Whether a removal may be that of a whole thread."""
        idle = self._retention is not None and self._retention.idle is not None
        return removal.kind == "delete" or (removal.kind == "expire" and idle)

    def _only(self, cell: Cell) -> Op | None:
        """The one call that can have stored what is in a cell, or `None` where several can, or none for sure."""
        ops = [op for op in self._cells[cell].ops if op.outcome != "refused"] if cell in self._cells else []
        return ops[0] if len(ops) == 1 and ops[0].known < inf else None

    def _may_be_gone(self, thread: str, cell: Cell, ended: float) -> bool:
        """Whether a checkpoint's absence is in order by a time: removed, or never stored for sure."""
        ops = self._cells[cell].ops if cell in self._cells else []
        return not any(self._certain(op, cell, ended) for op in ops)

    def _observe(
        self, cell: Cell, owner: Cell, content: Any, began: float, ended: float, what: str, surely: Op | None = None
    ) -> Op | None:
        history = self._cells.get(cell)
        ops = history.ops if history is not None else []
        if content is GONE:
            for op in ops:
                if self._certain(op, owner, began):
                    raise Violation(f"{what} is lost: {op} stored it, known since {op.known - ops[0].began:.3f}")
            return None
        matches = [op for op in ops if op.began <= ended and op.cells[cell] == content]
        possible = [op for op in matches if op.outcome != "refused"]
        if not possible:
            raise Violation(
                f"{what} shows what {matches[0]} was refused to store"
                if matches
                else f"{what} shows what nobody stored there: {content!r:.60}"
            )
        assert history is not None
        if cell[0] == "w" and cell[-1] >= 0:
            self._first_wins(history, owner, possible, what)
        else:
            self._last_wins(history, owner, possible, began, what, surely)
        for removal in self._removals_on(cell[1]) if cell == owner else ():
            over = removal.outcome == "acked" and removal.ended <= began
            if over and all(_there_since(op) <= removal.began for op in possible) and self._must_remove(removal, owner):
                raise Violation(f"{what} is there although {removal} removed it")
        if len(possible) == 1:
            possible[0].known = min(possible[0].known, ended)
            return possible[0]
        return None

    def _last_wins(
        self, history: _History, owner: Cell, seen: list[Op], began: float, what: str, surely: Op | None
    ) -> None:
        for other in () if history.mixed else history.ops:
            if other in seen or not (other is surely or self._certain(other, owner, began)):
                continue
            if all(_precedes(op, other) or (op, other) in history.order for op in seen):
                raise Violation(f"{what} is stale: it shows {seen[0]}, which {other} had replaced")
            if len(seen) == 1:
                history.order.add((other, seen[0]))

    def _first_wins(self, history: _History, owner: Cell, seen: list[Op], what: str) -> None:
        if history.mixed:
            return
        for other in history.ops:
            happened = other.known < inf and not self._unsure(other, owner) and not self._was_stray(other, owner)
            if happened and other not in seen and all(_precedes(other, op) for op in seen):
                raise Violation(f"{what} shows {seen[0]}, but {other} came first")
        first = history.first
        excused = first is None or first in seen or self._unsure(first, owner) or self._was_stray(first, owner)
        if not excused:
            raise Violation(f"{what} shows {seen[0]}, where readers have seen {first}")
        if len(seen) == 1:
            history.first = seen[0]

    def _observe_blob(
        self, op: Op, thread: str, channel: str, version: Hashable, value: Any, when: tuple[float, float], what: str
    ) -> None:
        began, ended = when
        namespace = op.about["namespace"]
        cell = "b", thread, namespace, channel, version
        history = self._cells.get(cell)
        if history is None:
            if value is not None:
                raise Violation(f"{what}: channel {channel!r} has a value that nobody stored")
            return
        own = "c", thread, namespace, op.about["id"]
        what = f"{what}, channel {channel!r} at {version!r}"
        if value is None and not any(each.cells[cell] is EMPTY for each in history.ops):
            for each in history.ops:
                happened = (each is op or each.known <= began) and each.outcome != "refused"
                if happened and not any(
                    self._base_may_be_gone(op, removal) or self._blob_may_be_gone(each, cell, op, removal)
                    for removal in self._removals_on(thread)
                ):
                    raise Violation(f"{what} is lost: {each} stored it")
            return
        self._observe(cell, own, EMPTY if value is None else value, began, ended, what, op)

    def _blob_may_be_gone(self, call: Op, cell: Cell, op: Op, removal: Op) -> bool:
        """Whether a removal may have taken what a call stored under a version, since the checkpoints that have that
        version (by way of whom `op` has it) came later."""
        if call is op or removal.outcome == "refused" or removal.ended <= call.began:
            return False
        if not self._may_remove(removal, _checkpoint_cell(call)):
            return False
        *_, channel, version = cell
        heir: Op | None = op
        while heir is not None and heir.ended > removal.began:
            parents = self._cells.get(("c", op.thread, op.about["namespace"], heir.about["parent"]))
            ops = parents.ops if parents is not None else []
            heir = next((each for each in ops if each.about["versions"].get(channel) == version), None)
        return heir is None

    def _base_may_be_gone(self, op: Op, removal: Op) -> bool:
        """Whether a checkpoint may have been put on one that a removal took, with values that it inherits; or one that
        it inherits from may have been."""
        namespace = op.about["namespace"]
        seen: set[str] = set()
        ops = [op]
        while ops:
            at = ops.pop()
            parent = at.about["parent"]
            if parent is None or parent in seen or removal.outcome == "refused" or at.ended <= removal.began:
                continue
            seen.add(parent)
            cell: Cell = ("c", op.thread, namespace, parent)
            if self._may_remove(removal, cell):
                return True
            ops += self._cells[cell].ops if cell in self._cells else []
        return False

    def _observe_writes(self, op: Op, owner: Cell, stored: Stored, when: tuple[float, float], what: str) -> None:
        began, ended = when
        _, thread, namespace, id_ = owner
        seen: dict[tuple[str, int], Any] = {}
        order = [(write.task_path, write.task_id, write.index) for write in stored.writes]
        if order != sorted(order):
            raise Violation(f"{what}: its writes are not in order: {order}")
        calls: list[Op] = []
        for write in stored.writes:
            key = write.task_id, write.index
            if key in seen:
                raise Violation(f"{what} shows write {key} twice")
            seen[key] = write.channel, write.value, write.task_path
            cell: Cell = ("w", thread, namespace, id_, *key)
            call = self._observe(cell, owner, seen[key], began, ended, f"{what}, write {key}")
            if call is not None:
                calls.append(call)
        for call in calls:
            for cell in call.cells:
                if cell[-2:] not in seen:
                    raise Violation(f"{what}: of {call} only a part is there: {cell[-2:]} is missing")
        for cell in self._written.get((thread, namespace, id_), ()):
            if cell[-2:] not in seen:
                for each in self._cells[cell].ops:
                    if self._certain(each, owner, began) and not self._was_stray(each, owner):
                        raise Violation(f"{what}: write {cell[-2:]} of {each} is lost")

    def _was_stray(self, call: Op, owner: Cell) -> bool:
        """Whether writes may have been dropped because their checkpoint did not come within the grace."""
        puts = [op.known for op in self._cells[owner].ops] if owner in self._cells else []
        return min(puts, default=inf) > call.began + max(0.0, 0.9 * self._grace - self.spread)


class _Empty:
    def __repr__(self) -> str:
        return "no value"

    def __reduce__(self) -> str:
        return "EMPTY"


EMPTY = _Empty()
"""What a blob's cell holds where the channel had no value."""


def _there_since(op: Op) -> float:
    """When what a call stored was in its thread for sure, if at all: a copy brings it later than it was stored."""
    return max(op.ended, op.about.get("copied", 0.0))


def _precedes(op: Op, other: Op) -> bool:
    """Whether a call took effect before another began: it was over by then, or somebody had seen it."""
    return min(op.ended, op.known) <= other.began


def _checkpoint_cell(op: Op) -> Cell:
    return "c", op.thread, op.about["namespace"], op.about["id"]
