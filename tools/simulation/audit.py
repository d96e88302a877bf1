"""The checks while nothing moves: everything is read, by those who have read before and by somebody new.

Rules of this module:

- All readers must agree, checkpoint by checkpoint; the oracle judges what they see.
- What chains contributed is compared with a plain walk over parents.
- The store is looked at directly only for what must not be there any more, and for what manifests refer to.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from lsm.errors import LSMError
from lsm.format.names import segment_key
from lsm.history import ChannelHistory
from lsm.read import Stored
from lsm.steps import Sleep, Steps
from lsm.view import open_view
from tools.simulation.actors import DELTA, Cast, run_term
from tools.simulation.oracle import Oracle
from tools.simulation.store import FOREIGN
from tools.simulation.world import Node, Violation, World

Contents = dict[tuple[str, str], Stored]


class Audit:
    """Reads everything.

    Args:
        world: Where.
        cast: Whose calls are to be checked.
        oracle: Judges.
        random: Chooses what is read in more than one way.
    """

    def __init__(self, world: World, cast: Cast, oracle: Oracle, random: Random):
        self._world = world
        self._cast = cast
        self._oracle = oracle
        self._random = random

    def by(self, newcomer: Node, others: Sequence[Node]) -> Steps[None]:
        """Have a node that knows nothing read everything, and one of the others, too; all must see the same."""
        for thread in self._cast.threads:
            contents = yield from self._read(newcomer, thread)
            yield from self._read_in_other_ways(newcomer, thread, contents)
            witness = self._random.choice(others)
            again = yield from self._read(witness, thread)
            if list(again) != list(contents):
                raise Violation(f"{witness.name} sees {list(again)} in {thread}, {newcomer.name} {list(contents)}")
            for key, stored in contents.items():
                if again[key] != stored:
                    raise Violation(f"by {witness.name}, thread {thread}, {_difference(again[key], stored)}")
            node = self._random.choice(others)
            for space in sorted({space for space, _ in contents}):
                yield from self._latest(node, thread, space, contents)

    def _read(self, node: Node, thread: str) -> Steps[Contents]:
        began = self._world.now
        listed = yield from self._cast.browse(node, "audit", thread, None, 7, float)
        contents = {(stored.namespace, stored.id): stored for stored in listed}
        for namespace, id_ in self._oracle.checkpoint_ids(thread):
            if (namespace, id_) not in contents:
                self._oracle.observe_absence(
                    thread, namespace, id_, began, self._world.now, f"a listing by {node.name}"
                )
        # Again: what was seen of one call says that the rest of it must be there, too.
        for stored in listed:
            self._oracle.observe_checkpoint(thread, stored, self._world.now, self._world.now)
        return contents

    def _read_in_other_ways(self, node: Node, thread: str, contents: Contents) -> Steps[None]:
        cast, random = self._cast, self._random
        everything = self._oracle.checkpoint_ids(thread)
        asked = random.sample(everything, min(2, len(everything)))
        for space in sorted({space for space, _ in everything}):
            if (latest := (yield from self._latest(node, thread, space, contents))) is not None:
                yield from self._walk(node, thread, latest, contents)
        for space, id_ in asked:
            found = yield from cast.get(node, "audit", thread, space, id_)
            listed = contents.get((space, id_))
            if found is None or listed is None:
                if found is not listed:
                    how = "is found by its id only" if found else "is listed only"
                    raise Violation(f"checkpoint {id_} of thread {thread}, {space!r}, {how}")
            elif found != listed:
                raise Violation(f"by its id, thread {thread}, {_difference(found, listed)}")
            else:
                yield from self._walk(node, thread, found, contents)
        if contents:
            yield from self._filter(node, thread, contents)

    def _latest(self, node: Node, thread: str, space: str, contents: Contents) -> Steps[Stored | None]:
        latest = max((id_ for of, id_ in contents if of == space), default=None)
        found: Stored | None = yield from self._cast.get(node, "audit", thread, space)
        if found is None or latest is None:
            if found is not None or latest is not None:
                raise Violation(f"the latest of thread {thread}, {space!r} is {found and found.id}, not {latest}")
        elif found != contents[space, latest]:
            raise Violation(f"the latest of thread {thread}: {_difference(found, contents[space, latest])}")
        return found

    def _filter(self, node: Node, thread: str, contents: Contents) -> Steps[None]:
        runs = sorted({self._run_of(thread, stored) for stored in contents.values()})
        run = self._random.choice(runs)
        listing = node.engine.list([thread], terms=[[run_term(run)]])
        found: list[Stored] = []
        while batch := (yield from listing.next(3)):
            found += [stored for _, stored in batch]
        wanted = [stored for stored in contents.values() if self._run_of(thread, stored) == run]
        if _ids(found) != _ids(wanted):
            raise Violation(f"a listing of {run} in thread {thread} gives {_ids(found)}, not {_ids(wanted)}")
        for one, other in zip(found, wanted, strict=True):
            if one != other:
                raise Violation(f"in a listing of {run}, thread {thread}, {_difference(one, other)}")

    def _run_of(self, thread: str, stored: Stored) -> str:
        return str(self._oracle.op_of(thread, stored).about["run"])

    # Chains.

    def _walk(self, node: Node, thread: str, stored: Stored, contents: Contents) -> Steps[None]:
        namespace, id_ = stored.namespace, stored.id
        if DELTA in stored.values:
            return
        answer: dict[str, ChannelHistory] = yield from node.engine.history(thread, namespace, id_, [DELTA])
        expected = self._expected(thread, stored, contents)
        if expected is None:
            return
        writes, seed = expected
        found = answer[DELTA]
        if [(write.task_id, write.index, write.value) for write in found.writes] != writes:
            raise Violation(
                f"the chain of checkpoint {id_}, thread {thread}, {namespace!r}: the writes on {DELTA!r} are "
                f"{[write.value[1][:24] for write in found.writes]}, not {[value[1][:24] for _, _, value in writes]}"
            )
        if found.seed != seed:
            raise Violation(f"the chain of checkpoint {id_}, thread {thread}, {namespace!r}, has another seed")

    def _expected(self, thread: str, start: Stored, contents: Contents) -> tuple[list[Any], Any] | None:
        """The writes and the seed of a chain, or `None` where it cannot be told."""
        oracle, namespace = self._oracle, start.namespace
        chain: list[list[Any]] = []
        seed = None
        op = oracle.op_of(thread, start)
        seen = {start.id}
        while (parent := op.about["parent"]) is not None and parent not in seen:
            seen.add(parent)
            at = contents.get((namespace, parent))
            if at is not None:
                op = oracle.op_of(thread, at)
                writes = [(each.task_id, each.index, each.value) for each in at.writes if each.channel == DELTA]
                seed = at.values.get(DELTA)
            elif not oracle.has_removals(thread):
                break
            else:
                hidden = oracle.hidden(op, DELTA)
                if hidden is None:
                    return None
                op, writes, seed = hidden
            chain.insert(0, writes)
            if seed is not None:
                break
        return [write for writes in chain for write in writes], seed

    # The store itself.

    def collect(self, node: Node) -> Steps[None]:
        """After a collector ran, nothing is stored that nobody refers to."""
        grace = self._world.grace
        for _ in range(2):
            yield Sleep(grace * 2 + self._oracle.spread)
            try:
                yield from node.engine.collect(grace)
            except LSMError as error:
                raise Violation(f"the collector raised {type(error).__name__}: {error}") from error
        objects = self._world.store.objects
        if hurt := [key for key, body in FOREIGN.items() if key not in objects or objects[key].body != body]:
            raise Violation(f"these objects are somebody else's, and not as they were: {hurt}")
        wanted = {"lsm.json", *FOREIGN}
        for key in sorted(objects):
            if key.startswith("manifests/"):
                view = open_view(key, objects[key].body, objects[key].tag, None, self._world.store.appends)
                if view.header.deleted:
                    continue
                wanted.add(key)
                wanted |= {segment_key(view.header.thread_id, info.ulid) for info in view.segments()}
        if missing := sorted(wanted - objects.keys() - {"lsm.json"}):
            raise Violation(f"these objects are referred to, and gone: {missing}")
        if left := sorted(objects.keys() - wanted):
            raise Violation(f"nobody refers to these objects, and they are still there after the grace: {left}")


def _ids(found: list[Stored]) -> list[str]:
    return [stored.id for stored in found]


def _difference(one: Stored, other: Stored) -> str:
    """In what two readings of a checkpoint differ."""
    fields = [field for field in Stored.__dataclass_fields__ if getattr(one, field) != getattr(other, field)]
    shown = [f"{field}: {getattr(one, field)!r:.80}, not {getattr(other, field)!r:.80}" for field in fields]
    return f"checkpoint {one.id} of {one.namespace!r} differs in {'; '.join(shown)}"
