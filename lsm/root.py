"""The first write under a root: is this a store that keeps the promises everything else rests on?

Rules of this module:

- `lsm.json` is written once, after the store has refused what it must refuse, and never changed. That it is there
  means: conditional writes were verified here.
- Trust nothing but answers to real writes. What a store claims to be does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from typing import Any

from lsm.errors import (
    ConditionalWritesUnsupported,
    Conflict,
    CorruptionError,
    FormatVersionError,
    LSMError,
    NestedStoreError,
    Throttled,
    Unavailable,
)
from lsm.format.names import FOLDERS
from lsm.steps import All, Create, Delete, Enclosing, Found, Get, Now, PutIf, Sleep, Steps, Tag, results

KEY = "lsm.json"
FORMAT = 1
"""The version of the layout under a root that this code reads and writes."""

_CONCLUSIVE = 300.0  # seconds; later, a collector may have taken the probe's objects for garbage
_PATIENCE = 5  # how often a throttled request of the probe is sent


def verify_root(url: str, entropy: Callable[[int], bytes]) -> Steps[None]:
    """Make sure that the root is one to write to: of a format that this code knows, in a store with conditional writes.
    One request where `lsm.json` exists, four rounds where it does not.

    Args:
        url: The address of the storage that answers the requests, for messages.
        entropy: Makes random bytes.

    Raises:
        ConditionalWritesUnsupported: The store accepted a write that it must not accept, or refuses those it must.
        NestedStoreError: A new root would lie in the folders of another store.
        FormatVersionError: The root was made by a newer version.
        CorruptionError: `lsm.json` is not what this project writes.
        StorageError: A request failed.

    Example:
        >>> import os
        >>> from lsm.drive import run
        >>> from lsm.storage import open_storage
        >>> storage = open_storage("memory://")
        >>> run(verify_root(storage.url, os.urandom), storage)
    """
    found = yield Get(KEY)
    if found is None:
        yield from refuse_nested(url)
        probes = [f"probe/{entropy(12).hex()}" for _ in range(2)]
        began = yield Now()
        try:
            yield from _prove(url, *probes)
        except LSMError as error:
            yield All([Delete(probes)])  # as far as that works
            if isinstance(error, ConditionalWritesUnsupported) and (yield Now()) - began > _CONCLUSIVE:
                raise Unavailable(f"{url}: the probe of the store took so long that it proves nothing") from error
            raise
        _, created = yield All([Delete(probes), _patiently(Create(KEY, _body()))])
        if not isinstance(created, Exception):
            return
        if not isinstance(created, Conflict):
            raise created
        found = yield Get(KEY)  # somebody else was first, or this was our own write, sent twice
    _check(url, found)


def refuse_nested(url: str) -> Steps[None]:
    """See that the root does not lie in the folders of another store.

    Raises:
        NestedStoreError: If it does.
    """
    outer = yield Enclosing(KEY, FOLDERS)
    if outer is not None:
        raise NestedStoreError(
            f"{url}: this root lies in the folders of the store {outer}, which would take its objects for its own, or "
            "for garbage. Use a place outside of it"
        )


def _prove(url: str, one: str, other: str) -> Steps[None]:
    """Have the store refuse a create of what exists, and a write whose tag is that of another object; and have it
    accept a write whose tag is right."""
    tags: list[Tag] = results((yield All([_create(one, b"one"), _create(other, b"other")])))
    created, misplaced, replaced = yield All(
        [
            _patiently(Create(one, b"created again")),
            _patiently(PutIf(one, b"written over", tags[1])),
            _patiently(PutIf(other, b"replaced", tags[1])),
        ]
    )
    for outcome, what in [(created, "a create of an object that exists"), (misplaced, "a write with a stale ETag")]:
        if isinstance(outcome, Conflict):
            continue
        if isinstance(outcome, Exception):
            raise outcome
        raise ConditionalWritesUnsupported(
            f"{url}: the store accepted {what}. It ignores the conditions of writes (If-None-Match, If-Match), so that "
            "two writers would overwrite each other's commits without a sign of it. Nothing is stored here. Use a "
            "store with conditional writes, or a version of this one that has them."
        )
    if isinstance(replaced, Conflict):
        found = yield Get(other)  # its answer may have been lost, and our own write met when it was sent again
        if not isinstance(found, Found) or found.body != b"replaced":
            raise ConditionalWritesUnsupported(
                f"{url}: the store refuses a write with the right ETag (If-Match), so that no commit would ever "
                "succeed. Use a store with conditional writes."
            ) from replaced
    elif isinstance(replaced, Exception):
        raise replaced


def _create(key: str, body: bytes) -> Steps[Tag]:
    try:
        tag: Tag = yield from _patiently(Create(key, body))
    except Conflict:
        found = yield Get(key)  # nobody else knows the name, so this was our own write, sent twice
        if not isinstance(found, Found):
            raise
        tag = found.tag
    return tag


def _patiently(request: Any) -> Steps[Any]:
    """The request, again after a while if the store asks to slow down: the probe writes to one name at once."""
    for attempt in range(1, _PATIENCE):
        try:
            return (yield request)
        except Throttled:
            yield Sleep(float(attempt))
    return (yield request)


def _body() -> bytes:
    try:
        version = metadata.version("langgraph-checkpoint-lsm")
    except metadata.PackageNotFoundError:
        version = "unknown"  # run from a source tree
    content = {
        "format": FORMAT,
        "conditional_writes": "verified",
        "created_by": f"langgraph-checkpoint-lsm/{version}",
    }
    return json.dumps(content, indent=2).encode() + b"\n"


def _check(url: str, found: Found | None) -> None:
    if found is None:
        raise CorruptionError(f"{url}: {KEY} was removed while it was being written. Try again.")
    try:
        content = json.loads(found.body)
        version = content["format"]
        verified = content["conditional_writes"] == "verified"
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptionError(
            f"{url}: {KEY} is damaged, or not of this project: {found.body[:80]!r}. Restore it, or, if this root is "
            "right, delete it: it is written anew."
        ) from error
    if type(version) is not int or version < 1 or not verified:
        raise CorruptionError(f"{url}: {KEY} is damaged, or not of this project: {found.body[:80]!r}. Restore it.")
    if version > FORMAT:
        raise FormatVersionError(
            f"{url}: the root has format {version}, written by {content.get('created_by', 'a newer version')}; this "
            f"version knows format {FORMAT}. Upgrade langgraph-checkpoint-lsm."
        )
