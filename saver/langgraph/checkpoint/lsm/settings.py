"""What the command line's words mean: lengths of time, shards, retentions, options of stores.

Rules of this module:

- Pure. What makes no sense is a `ValueError` that says what would.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lsm.retention import Retention

_UNITS = {"w": "weeks", "d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[wdhms])+")
_PARTS = ("max_age", "max_checkpoints", "idle")


def duration(text: str) -> timedelta:
    """A length of time.

    Raises:
        ValueError: If it is none.

    Example:
        >>> duration("30d"), duration("1h30m"), duration("0s")
        (datetime.timedelta(days=30), datetime.timedelta(seconds=5400), datetime.timedelta(0))
    """
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is no length of time: write numbers with w, d, h, m or s, as in 30d or 1h30m")
    parts = re.findall(r"([\d.]+)([wdhms])", text)
    return sum((timedelta(**{_UNITS[unit]: float(number)}) for number, unit in parts), timedelta())


def shard(text: str) -> tuple[int, int]:
    """A part of a store.

    Raises:
        ValueError: If it is none.

    Example:
        >>> shard("0/4")
        (0, 4)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise ValueError(f"{text!r} is no shard: write its number, from 0, and how many there are, as in 0/4 to 3/4")
    return int(found[1]), int(found[2])


def retention(
    file: Path | None, max_age: timedelta | None, max_checkpoints: int | None, idle: timedelta | None
) -> Retention | None:
    """A retention from a TOML file and from flags, which count more; `None` where neither says anything.

    Raises:
        ValueError: If the file or a part makes no sense.
    """
    parts: dict[str, Any] = {}
    if file is not None:
        try:
            parts = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{file}: {error}") from error
        unknown = sorted(set(parts) - set(_PARTS))
        if unknown:
            raise ValueError(f"{file}: unknown {', '.join(unknown)}; there are {', '.join(_PARTS)}")
        for name in ("max_age", "idle"):
            if name in parts:
                if not isinstance(parts[name], str):
                    raise ValueError(f'{file}: {name} must be a text, as in {name} = "30d"')
                parts[name] = duration(parts[name])
    flags = {"max_age": max_age, "max_checkpoints": max_checkpoints, "idle": idle}
    parts.update({name: value for name, value in flags.items() if value is not None})
    return Retention(**parts) if parts else None


def store_options(pairs: Sequence[str]) -> dict[str, Any] | None:
    """The options of a store; a dot in a key leads into a group of options.

    Raises:
        ValueError: If one has no value.

    Example:
        >>> store_options(["region=eu-central-1", "client_options.allow_http=true"])
        {'region': 'eu-central-1', 'client_options': {'allow_http': True}}
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise ValueError(f"{pair!r} is no option of a store: write KEY=VALUE")
        *groups, name = key.split(".")
        at = options
        for group in groups:
            at = at.setdefault(group, {})
            if not isinstance(at, dict):
                raise ValueError(f"{pair!r}: {group} is given as an option and as a group of options")
        at[name] = {"true": True, "false": False}.get(text, text)
    return options or None
