"""Where the objects are: one protocol, and an address for each implementation.

Rules of this package:

- A storage answers the storage requests of `lsm.steps`, one at a time, and knows keys, bytes and tags: nothing of
  threads, manifests or segments. `All`, `Sleep`, `Now`, `Monotonic` and `Wait` are the drivers' (`lsm.drive`).
- What fails is raised as a `lsm.errors.StorageError` with a message that a person can act on. Nothing is retried
  here beyond what an object store's client does by itself.
- A storage is used by any number of threads and event loops at once.
- Only the module of an implementation imports what that implementation needs.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from lsm.errors import ConditionalWritesUnsupported

_OBJECT_STORES = ("s3", "gs", "az")
_SCHEMES = ("file", "memory", *_OBJECT_STORES)
_FILE_PLATFORMS = ("linux", "darwin")


class Storage(Protocol):
    """Answers storage requests.

    Attributes:
        url: Where the objects are, for messages: never with credentials in it.
        local: Requests are answered at the speed of a local call, so that drivers run them where they are,
            an event loop's thread included. A storage that is not local has a true `aexecute`.
        appends: `Append` sends the new bytes only.
        conditional_deletes: It answers `DeleteIf`.
    """

    url: str
    local: bool
    appends: bool
    conditional_deletes: bool

    def execute(self, request: Any) -> Any:
        """Answer one of `Get`, `GetRanges`, `Create`, `PutIf`, `Append`, `Delete`, `DeleteIf`, `List`, `OpenUpload`,
        `UploadPart`, `FinishUpload`, `AbortUpload`; what the answer is, each says of itself.

        Raises:
            StorageError: The request failed.
            ConditionalWritesUnsupported: The store has no conditional writes.
            ForkedProcessError: The process is a child of one that used the storage, which does not survive that.
        """
        ...

    async def aexecute(self, request: Any) -> Any:
        """`execute`, for asyncio."""
        ...

    def close(self) -> None:
        """Let go of connections. The storage may still be used, at the cost of new ones."""
        ...


def open_storage(url: str, *, store_options: Mapping[str, Any] | None = None, fsync: bool = True) -> Storage:
    """The storage at an address. Nothing is read, written or connected to yet.

    Args:
        url: `file:///directory`, `memory://` (private), `memory://name` (shared by its name within the process),
            `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.
        store_options: For object stores: what `obstore.store.from_url` takes, `client_options` and `retry_config`
            included. What is not given comes from the environment (`AWS_ACCESS_KEY_ID`, ...).
        fsync: For files: whether a write returns only once the disk has it. Without, a loss of power may lose
            acknowledged writes; the death of the process does not.

    Raises:
        ValueError: The address or the options do not make sense.
        ConditionalWritesUnsupported: `file://` on a system without what it needs.

    Example:
        >>> from lsm.steps import Create, Get
        >>> storage = open_storage("memory://")
        >>> tag = storage.execute(Create("a/b", b"hello"))
        >>> storage.execute(Get("a/b")).body
        b'hello'
    """
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise ValueError(_unknown_scheme(url, parts.scheme))
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r}: an address has no '?' or '#' part; options go into store_options=")
    if parts.scheme in _OBJECT_STORES:
        if not parts.netloc:
            raise ValueError(f"{url!r} names no bucket; write {parts.scheme}://bucket/prefix")
        from lsm.storage.objects import ObjectStorage

        return ObjectStorage.from_url(url, store_options)
    if store_options:
        raise ValueError(f"store_options are for object stores ({', '.join(_OBJECT_STORES)}); {url!r} takes none")
    if parts.scheme == "memory":
        from lsm.storage.memory import MemoryStorage

        return MemoryStorage.named(name) if (name := parts.netloc + parts.path.rstrip("/")) else MemoryStorage()
    folder = _folder(url, parts.netloc, unquote(parts.path))
    from lsm.storage.files import FileStorage

    return FileStorage(folder, fsync=fsync)


def _folder(url: str, host: str, path: str) -> str:
    if sys.platform not in _FILE_PLATFORMS:
        raise ConditionalWritesUnsupported(
            f"{url!r}: file:// needs flock and atomic renames as Linux and macOS have them, and is refused on "
            f"{sys.platform}. Use an object store, or memory:// for tests."
        )
    if host:
        raise ValueError(
            f"{url!r} names the host {host!r}: a file address has three slashes and an absolute path. "
            f"Did you mean 'file:///{host}{path}'? For a path relative to the working directory, use "
            "pathlib.Path(...).resolve().as_uri()"
        )
    if not path.startswith("/"):
        raise ValueError(f"{url!r} has no absolute path; write file:///directory")
    if os.path.abspath(path).strip("/") == "":
        raise ValueError(
            f"{url!r} is the root of the file system, which holds other things: give the store a folder of its "
            "own, as in file:///var/lib/checkpoints"
        )
    return path


def _unknown_scheme(url: str, scheme: str) -> str:
    known = ", ".join(f"{name}://" for name in _SCHEMES)
    if not scheme:
        return f"{url!r} is not an address: it has no scheme. Known are {known}"
    aliases = {"gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "mem": "memory"}
    close = [aliases[scheme]] if scheme in aliases else difflib.get_close_matches(scheme, _SCHEMES, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(f'{name}://' for name in close)}?" if close else "."
    return f"{url!r}: there is no storage for {scheme}://{hint} Known are {known}"
