"""Ending work early, without leaving half of it.

Rules of this module:

- Whoever asks sets a flag, from any thread, process or signal handler; nobody is interrupted in the middle of a
  request. Steps that are under way meet `Stopped` in place of their next request, wherever they are nested, and all
  that they began side by side with others meets it, too.
- Steps meet it once: what they ask for after that is their tidying up, and is done.
"""

from __future__ import annotations

from types import GeneratorType
from typing import Any, Protocol, TypeVar

from lsm.steps import AbortUpload, All, Steps, Unlock

T = TypeVar("T")

_LETTING_GO = (AbortUpload, Unlock)  # these never fail


class Stopped(Exception):
    """The work is to end. Steps may tidy up when they meet it, such as to abort an upload, and end."""


class Flag(Protocol):
    """What can be set so that others see it, as `multiprocessing.RawValue("b", 0)`, which other processes see."""

    value: Any


class _Flag:
    value = 0


class Stop:
    """A request to end that may come at any time, for everything that runs under it.

    Args:
        flag: Where it is kept; in this process, if left out. It takes no lock, so that a signal handler may set it.

    Example:
        >>> from lsm.drive import run
        >>> from lsm.steps import Get
        >>> from lsm.storage import open_storage
        >>> def read(keys):
        ...     for key in keys:
        ...         yield Get(key)
        >>> stop, storage = Stop(), open_storage("memory://")
        >>> run(stop.unless_asked(read(["a", "b"])), storage)
        >>> stop.ask()
        >>> run(stop.unless_asked(read(["a", "b"])), storage)
        Traceback (most recent call last):
        lsm.stop.Stopped: asked to stop
    """

    def __init__(self, flag: Flag | None = None):
        self.flag = _Flag() if flag is None else flag

    @property
    def asked(self) -> bool:
        """Whether work is to end."""
        return bool(self.flag.value)

    def ask(self) -> None:
        """Have all work under this end. Returns at once."""
        self.flag.value = 1

    def unless_asked(self, steps: Steps[T]) -> Steps[T]:
        """Steps that do what these do, until they are asked to stop.

        Raises:
            Stopped: If they were, and let that pass.
        """
        answer: Any = None
        failure: BaseException | None = None
        told = False
        try:
            while True:
                try:
                    request = steps.send(answer) if failure is None else steps.throw(failure)
                except StopIteration as end:
                    result: T = end.value
                    return result
                answer, failure = None, None
                if not told and self.asked and not isinstance(request, _LETTING_GO):
                    told, failure = True, Stopped("asked to stop")
                    continue
                try:
                    answer = yield request if told else self._within(request)
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 (for the steps to see)
                    failure = error
                told = told or isinstance(failure, Stopped) or _any_stopped(answer)
        finally:
            steps.close()

    def _within(self, request: Any) -> Any:
        if isinstance(request, GeneratorType):
            return self.unless_asked(request)
        if isinstance(request, All):
            return All([self._within(each) for each in request.of])
        return request


def _any_stopped(answer: Any) -> bool:
    return isinstance(answer, list) and any(isinstance(each, Stopped) for each in answer)
