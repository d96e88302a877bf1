"""Faults planted into the engine, to see whether the tests that should find them do.

Rules of this module:

- A fault is a change of a function's source: text that is replaced. Where the text is not found exactly once, or what
  stands there instead names something that does not exist, planting fails, so that no fault is silently outgrown by the
  code: a `NameError` is found by every test, and proves nothing.
- The changed function takes the place of the original wherever `lsm` has imported it, for one test.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from types import CodeType, ModuleType
from typing import Any

import pytest


def plant(patch: pytest.MonkeyPatch, where: str, old: str, new: str) -> None:
    """Change a function.

    Args:
        patch: Undoes it.
        where: The function, as `module:name` or `module:Class.name`.
        old: Text of its source, which must be there once.
        new: What to replace it with.

    Raises:
        LookupError: The text is not there, or there is nothing of a name that the changed function has.
    """
    module = import_module(where.split(":", maxsplit=1)[0])
    path = where.split(":")[1].split(".")
    owner: Any = functools.reduce(getattr, path[:-1], module)
    name = path[-1]
    original = vars(owner)[name]
    source = textwrap.dedent(inspect.getsource(original))
    if source.count(old) != 1:
        raise LookupError(f"{where} has the text {old!r} {source.count(old)} times, not once: plant the fault anew")
    # Evaluated in the module itself, so that later changes of its names, such as another planted fault, are seen.
    scope = dict.fromkeys([name])
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), where, "exec"), vars(module), scope)
    changed = scope[name]
    if unknown := sorted(_unknown(inspect.unwrap(changed).__code__, module)):
        raise LookupError(f"{where}: there is no {', '.join(unknown)}: plant the fault anew")
    if owner is not module:
        patch.setattr(owner, name, changed)
        return
    for imported in [each for key, each in sys.modules.items() if key == "lsm" or key.startswith("lsm.")]:
        if vars(imported).get(name) is original:
            patch.setattr(imported, name, changed)


def _unknown(code: CodeType, module: ModuleType) -> Iterator[str]:
    """The names in a function, and in those within it, that neither its module nor Python has; and those that the
    modules among what they name have not."""
    known = vars(builtins) | vars(module)
    steps = [step for step in dis.get_instructions(code) if step.opname != "PUSH_NULL"]
    for step, after in pairwise(steps):
        if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        name, found = step.argval, known.get(step.argval)
        if name not in known:
            yield name
        elif isinstance(found, ModuleType) and after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield from () if hasattr(found, after.argval) else (f"{name}.{after.argval}",)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _unknown(inner, module)
