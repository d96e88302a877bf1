"""What was found out, about a thread and about a store.

Rules of this module:

- A report is filled in while the check goes on. A problem that is met twice is told once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lsm.collect import Collected


@dataclass(slots=True)
class Report:
    """What was found out about a thread.

    Attributes:
        thread_id: The thread.
        problems: What is wrong, each naming the object; empty for a thread that is whole.
        checkpoints: How many checkpoints it has, the hidden ones included.
        writes: How many calls of `put_writes`.
        blobs: How many values of channels.
        segments: How many segments.
        bytes: How much it takes on storage, without garbage.
        torn: How many bytes at the end of its manifest a crash left behind; they are no part of it.
        garbage: Objects that nothing refers to: replaced segments, and uploads that were never committed.
        repaired: Whether the torn bytes were dropped.
        exists: Whether there is such a thread.
    """

    thread_id: str
    problems: list[str] = field(default_factory=list)
    checkpoints: int = 0
    writes: int = 0
    blobs: int = 0
    segments: int = 0
    bytes: int = 0
    torn: int = 0
    garbage: Collected = field(default_factory=Collected)
    repaired: bool = False
    exists: bool = True

    def note(self, problem: str) -> None:
        """Take down a problem."""
        if problem not in self.problems:
            self.problems.append(problem)

    def expect(self, condition: bool, problem: str) -> None:
        """Take down a problem, unless the condition holds."""
        if not condition:
            self.note(problem)


@dataclass(slots=True)
class StoreReport:
    """What was found out about a store: the sums of its threads' reports.

    Attributes:
        threads: How many threads.
        problems: By thread id (or the key of what is no thread's), what is wrong.
    """

    threads: int = 0
    checkpoints: int = 0
    segments: int = 0
    bytes: int = 0
    torn: int = 0
    repaired: int = 0
    garbage: Collected = field(default_factory=Collected)
    problems: dict[str, list[str]] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        """Count one thread."""
        self.threads += report.exists
        self.checkpoints += report.checkpoints
        self.segments += report.segments
        self.bytes += report.bytes
        self.torn += report.torn > 0
        self.repaired += report.repaired
        self.garbage.add(report.garbage)
        if report.problems:
            self.problems[report.thread_id] = report.problems
