"""Objects in an object store, through obstore.

Rules of this module:

- Everything that is particular to obstore or to one object store is here: how it writes on condition, how it words
  its failures, how many times it tries. One request of ours may be several tries of obstore's.
- obstore does not survive a fork: once a process has sent a request, its children hang in theirs, for good, even
  with a store of their own. A child is told so instead. Making a store sends nothing, so that a store which was made
  but not used before the fork works in the child.
- A store has a tag for every state of an object: its ETag, and its version where the store has versions (GCS writes
  on condition of those). An answer without an ETag is refused, in `_tag` and nowhere else.

What obstore makes of HTTP answers (measured with 0.12): 412 and 409 are `PreconditionError` or `AlreadyExistsError`,
and so is 404 for a write with If-Match; 404 is the built-in `FileNotFoundError`, for a missing bucket as for a missing
object; what a store cannot do at all is the built-in `NotImplementedError`; all other answers, no answer and no
connection are `GenericError`, told apart by the text only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import LocalStore, ObjectStore, from_url

from lsm.errors import (
    ConditionalWritesUnsupported,
    Conflict,
    ForkedProcessError,
    LSMError,
    NotFound,
    Refused,
    Throttled,
    Unavailable,
)
from lsm.steps import (
    AbortUpload,
    Append,
    Create,
    Delete,
    Enclosing,
    Entry,
    FinishUpload,
    Found,
    Get,
    GetRanges,
    List,
    OpenUpload,
    Page,
    PutIf,
    UploadPart,
    check_size,
)

PAGE = 1000
"""Entries on one page of a listing: what the stores themselves send at once."""

PART = 8 * 2**20
"""Bytes of an upload that go in one request; S3 allows 10,000 of these."""

_CLIENT_VARIABLES = (
    "ALLOW_HTTP",
    "ALLOW_INVALID_CERTIFICATES",
    "CONNECT_TIMEOUT",
    "PROXY_CA_CERTIFICATE",
    "PROXY_EXCLUDES",
    "PROXY_URL",
    "TIMEOUT",
    "USER_AGENT",
)
CLIENT_OPTIONS: dict[str, Any] = {"connect_timeout": "5s", "timeout": "30s"}
RETRY_CONFIG: dict[str, Any] = {
    "max_retries": 5,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
"""A store that does not answer fails a request after half a minute to a minute: writes are not sent again after a
time-out, reads are, unless the 20 seconds are over. obstore's own defaults let a caller wait for minutes."""

_COALESCE = 2**20  # ranges closer than this are fetched as one; object_store's own measure

_CONDITIONAL = (Create, PutIf, Append)
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_NO_ETAG = re.compile(r"etag header missing", re.IGNORECASE)
_UNDECIDED = ("ConditionalRequestConflict", "OperationAborted", None)
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"}
_CREDENTIALS = re.compile(r"performing token request|//169\.254\.")  # of the machine's identity service


@dataclass(frozen=True, slots=True)
class ObjectTag:
    """The ETag of one state of an object. Tags that are equal have one `repr`, which sweeps remember.

    Attributes:
        etag: The ETag as the store gave it.
        version: What goes with it, and is not in every answer of a store.
        name: What tags are told apart by: the ETag without its quotation marks, which Azure leaves out of listings.
    """

    etag: str = field(compare=False, repr=False)
    version: str | None = field(default=None, compare=False, repr=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.etag.strip('"'))

    def condition(self) -> obstore.UpdateVersion:
        """For `obstore.put`, which takes no `None` for what is missing."""
        return {"e_tag": self.etag} if self.version is None else {"e_tag": self.etag, "version": self.version}


class ObjectStorage:
    """Objects below `prefix` in a ready obstore store.

    Args:
        store: An `S3Store`, `GCSStore`, `AzureStore`, or another store with conditional writes.
        prefix: Put before every key, with a `/` between, after the store's own prefix.
    """

    local = False
    appends = False
    conditional_deletes = False

    _used_by: ClassVar[int | None] = None  # the process that has sent the first request through obstore

    def __init__(self, store: ObjectStore, prefix: str = "") -> None:
        prefix = prefix.strip("/")
        self._store = store
        self._prefix = f"{prefix}/" if prefix else ""
        self._source: tuple[str, Mapping[str, Any] | None] | None = None
        self.url = f"{store!r}/{prefix}" if prefix else repr(store)

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any] | None = None) -> ObjectStorage:
        """The storage at `s3://`, `gs://` or `az://`; see `lsm.storage.open_storage`.

        Raises:
            ValueError: obstore does not take the address or the options.
        """
        given = dict(options or {})
        given["client_options"] = CLIENT_OPTIONS | _client_environment() | dict(given.get("client_options") or {})
        given["retry_config"] = RETRY_CONFIG | dict(given.get("retry_config") or {})
        try:
            store = from_url(url, **given)
        except (exceptions.BaseError, TypeError, ValueError) as error:
            raise ValueError(f"{url}: {_first_line(error)}") from error
        storage = cls(store)
        storage._source = url, options
        storage.url = url
        return storage

    def __reduce__(self) -> tuple[Callable[..., ObjectStorage], tuple[Any, ...]]:
        if self._source is not None:
            return ObjectStorage.from_url, self._source
        return ObjectStorage, (self._store, self._prefix)

    def execute(self, request: Any) -> Any:
        self._check_process()
        try:
            return _ANSWERS[type(request)](self, request)
        except (exceptions.BaseError, OSError, NotImplementedError) as error:
            raise self._explain(error, request) from error

    async def aexecute(self, request: Any) -> Any:
        self._check_process()
        try:
            return await _ASYNC_ANSWERS[type(request)](self, request)
        except (exceptions.BaseError, OSError, NotImplementedError) as error:
            raise self._explain(error, request) from error

    def close(self) -> None:
        """Nothing to let go of: idle connections are obstore's, and time out."""

    # The requests. Each is there twice, for obstore has each call twice; what goes in and comes out is shared below.

    def _get(self, request: Get) -> Any:
        try:
            result = obstore.get(self._store, self._path(request.key), options=_unless(request))
        except exceptions.NotModifiedError:
            return "unchanged"
        except FileNotFoundError as error:
            return self._absent(error, request)
        check_size(request, result.meta["size"])
        return Found(result.bytes().to_bytes(), self._tag(result.meta, request.key))

    async def _aget(self, request: Get) -> Any:
        try:
            result = await obstore.get_async(self._store, self._path(request.key), options=_unless(request))
        except exceptions.NotModifiedError:
            return "unchanged"
        except FileNotFoundError as error:
            return self._absent(error, request)
        check_size(request, result.meta["size"])
        return Found((await result.bytes_async()).to_bytes(), self._tag(result.meta, request.key))

    def _get_ranges(self, request: GetRanges) -> list[bytes]:
        path = self._path(request.key)
        spans = _spans(request.ranges)
        try:
            bodies = obstore.get_ranges(self._store, path, **_starts_and_ends(spans))
        except exceptions.GenericError as error:
            if not _is_past_the_end(error):
                raise
            spans = _cut(spans, obstore.head(self._store, path)["size"])
            bodies = obstore.get_ranges(self._store, path, **_starts_and_ends(spans))
        return _slices(request.ranges, spans, bodies)

    async def _aget_ranges(self, request: GetRanges) -> list[bytes]:
        path = self._path(request.key)
        spans = _spans(request.ranges)
        try:
            bodies = await obstore.get_ranges_async(self._store, path, **_starts_and_ends(spans))
        except exceptions.GenericError as error:
            if not _is_past_the_end(error):
                raise
            spans = _cut(spans, (await obstore.head_async(self._store, path))["size"])
            bodies = await obstore.get_ranges_async(self._store, path, **_starts_and_ends(spans))
        return _slices(request.ranges, spans, bodies)

    def _put(self, request: Create | PutIf | Append) -> ObjectTag:
        path = self._path(request.key)
        return self._tag(obstore.put(self._store, path, _body(request), **_condition(request)), request.key)

    async def _aput(self, request: Create | PutIf | Append) -> ObjectTag:
        path = self._path(request.key)
        written = await obstore.put_async(self._store, path, _body(request), **_condition(request))
        return self._tag(written, request.key)

    def _delete(self, request: Delete) -> None:
        try:
            obstore.delete(self._store, [self._path(key) for key in request.keys])
        except FileNotFoundError as error:
            self._absent(error, request)
            for rest in _one_by_one(request):
                self._delete(rest)

    async def _adelete(self, request: Delete) -> None:
        try:
            await obstore.delete_async(self._store, [self._path(key) for key in request.keys])
        except FileNotFoundError as error:
            self._absent(error, request)
            for rest in _one_by_one(request):
                await self._adelete(rest)

    def _list(self, request: List) -> Page:
        for found in obstore.list(self._store, **self._listing(request)):
            if (page := self._page(found, request)).entries:
                return page
        return Page([], False)

    async def _alist(self, request: List) -> Page:
        async for found in obstore.list(self._store, **self._listing(request)):
            if (page := self._page(found, request)).entries:
                return page
        return Page([], False)

    def _enclosing(self, request: Enclosing) -> str | None:
        for store, path, url in self._outer_marks(request):
            with suppress(FileNotFoundError):
                obstore.head(store, path)
                return url
        return None

    async def _aenclosing(self, request: Enclosing) -> str | None:
        for store, path, url in self._outer_marks(request):
            with suppress(FileNotFoundError):
                await obstore.head_async(store, path)
                return url
        return None

    def _outer_marks(self, request: Enclosing) -> Iterator[tuple[ObjectStore, str, str]]:
        """Where the marks of stores would be in whose folders this one lies: of a ready store, below its own prefix."""
        store, parts, url = self._store, [part for part in self._prefix.split("/") if part], self.url
        if self._source is not None:
            given, options = self._source
            address = urlsplit(given)
            url = f"{address.scheme}://{address.netloc}"
            parts = [part for part in unquote(address.path).split("/") if part]
            if set(parts) & set(request.folders):
                store = ObjectStorage.from_url(url, options)._store
        for at, part in enumerate(parts):
            if part in request.folders:
                outer = "/".join(parts[:at])
                yield store, f"{outer}/{request.mark}".lstrip("/"), f"{url}/{outer}".rstrip("/")

    def _open_upload(self, request: OpenUpload) -> obstore.WritableFile:
        return obstore.open_writer(self._store, self._path(request.key), buffer_size=PART, max_concurrency=2)

    async def _aopen_upload(self, request: OpenUpload) -> obstore.AsyncWritableFile:
        return obstore.open_writer_async(self._store, self._path(request.key), buffer_size=PART, max_concurrency=2)

    def _upload_part(self, request: UploadPart) -> None:
        request.handle.write(request.body)

    async def _aupload_part(self, request: UploadPart) -> None:
        await request.handle.write(request.body)

    def _finish_upload(self, request: FinishUpload) -> None:
        request.handle.close()

    async def _afinish_upload(self, request: FinishUpload) -> None:
        await request.handle.close()

    # To leave obstore's writer with an exception is its way to abort: what was stored of the upload is removed.

    def _abort_upload(self, request: AbortUpload) -> None:
        with suppress(Exception):
            request.handle.__exit__(_Aborted, _Aborted(), None)

    async def _aabort_upload(self, request: AbortUpload) -> None:
        with suppress(Exception):
            await request.handle.__aexit__(_Aborted, _Aborted(), None)

    # What the two sides share

    def _check_process(self) -> None:
        process = os.getpid()
        if ObjectStorage._used_by != process:
            if ObjectStorage._used_by is not None:
                raise ForkedProcessError(
                    f"{self.url}: this process was forked from one that had used an object store, and obstore's "
                    "connections do not survive that. Make the first use of a saver after the fork, or start workers "
                    'with multiprocessing.set_start_method("spawn") or "forkserver" (gunicorn: without --preload).'
                )
            ObjectStorage._used_by = process

    def _tag(self, meta: Any, key: str) -> ObjectTag:
        """Without an ETag there is nothing that the next write could be conditional on."""
        if not (etag := meta["e_tag"]) or not etag.strip('"'):
            raise ConditionalWritesUnsupported(self._without_etag(key))
        return ObjectTag(etag, meta["version"])

    def _path(self, key: str) -> str:
        return self._prefix + key

    def _listing(self, request: List) -> dict[str, Any]:
        # obstore's prefix means a folder, with or without the slash.
        prefix = self._path(request.prefix).rstrip("/")
        offset = None if request.after is None else self._path(request.after)
        return {"prefix": prefix or None, "offset": offset, "chunk_size": PAGE}

    def _page(self, found: Sequence[obstore.ObjectMeta], request: List) -> Page:
        # Azure was long without a way to begin a listing in the middle, and what speaks its protocol may still be: such
        # a store lists from the start.
        skip, after = len(self._prefix), request.after or ""
        entries = [
            Entry(key, each["size"], self._tag(each, key), each["last_modified"].timestamp())
            for each in found
            if (key := each["path"][skip:]) > after
        ]
        return Page(entries, len(found) >= PAGE)

    def _absent(self, error: Exception, request: Any) -> None:
        """It is no failure that the object is not there, but that the bucket is not."""
        if _code(str(error)) in _NO_BUCKET:
            raise self._explain(error, request) from error

    def _explain(self, error: Exception, request: Any) -> LSMError:
        key: str | None = getattr(request, "key", None)
        text = str(error)
        status = int(found[1]) if (found := _STATUS.search(text)) else None
        code = _code(text)
        what = f"{self.url}: {type(request).__name__} {key or ''}: {_first_line(error)}"
        conditional = isinstance(request, _CONDITIONAL)

        if code in _NO_BUCKET:
            return Refused(f"{self.url}: the bucket does not exist. Create it, or correct the address. ({what})", key)
        if conditional and (isinstance(error, NotImplementedError | exceptions.NotSupportedError) or status == 501):
            return ConditionalWritesUnsupported(self._unsupported(what))
        if _NO_ETAG.search(text):
            return ConditionalWritesUnsupported(self._without_etag(key))
        if isinstance(error, FileNotFoundError):
            return NotFound(f"{self.url}: there is no object {key}", key)
        if conditional and status == 409 and code in _UNDECIDED:
            return Throttled(f"{what}. Another write to the same name was under way.", key)
        if isinstance(error, exceptions.PreconditionError | exceptions.AlreadyExistsError):
            # 409 comes out as "already exists" whatever was asked; only a conditional write can lose against another.
            return Conflict(what, key) if conditional else Unavailable(what, key)
        if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            return Refused(
                f"{what}. Check the credentials (environment or store_options) and that they may read, write, list and "
                "delete below the prefix; without the permission to list, S3 answers so for objects that do not exist.",
                key,
            )
        if status == 429 or (status == 503 and code in ("SlowDown", "ServerBusy", "TooManyRequests", None)):
            return Throttled(what, key)
        if _CREDENTIALS.search(what):
            hint = (
                "No credentials were given, nor has the machine any: set them in the environment or in store_options."
            )
            return (Refused if status is not None and status < 500 else Unavailable)(f"{what}. {hint}", key)
        if "configured region" in text:
            return Refused(f"{what}. Set the bucket's region (AWS_REGION, or region in store_options).", key)
        if status is not None and 400 <= status < 500 and status != 408:
            return Refused(f"{what}. The store will answer so again: check address, credentials and clock.", key)
        return Unavailable(what, key)

    def _without_etag(self, key: str | None) -> str:
        return (
            f"{self.url}: the answer about {key} has no ETag, without which no commit can be made on the condition "
            "that nobody else's came before. Use a store that sends ETags; if this one does, have what lies between "
            "(a proxy, a gateway) leave them in its answers. If this was a write, it may be stored all the same."
        )

    def _unsupported(self, what: str) -> str:
        if isinstance(self._store, LocalStore):
            return (
                f"{self.url}: obstore's LocalStore cannot replace a file on condition, so that commits would be lost. "
                "Give the saver the directory's address instead, file:///directory, which does not go through obstore."
            )
        return f"{what}. The store has no conditional writes, without which commits would be lost: use one that has."


_ANSWERS: dict[type, Callable[[ObjectStorage, Any], Any]] = {
    Get: ObjectStorage._get,
    GetRanges: ObjectStorage._get_ranges,
    Create: ObjectStorage._put,
    PutIf: ObjectStorage._put,
    Append: ObjectStorage._put,
    Delete: ObjectStorage._delete,
    List: ObjectStorage._list,
    Enclosing: ObjectStorage._enclosing,
    OpenUpload: ObjectStorage._open_upload,
    UploadPart: ObjectStorage._upload_part,
    FinishUpload: ObjectStorage._finish_upload,
    AbortUpload: ObjectStorage._abort_upload,
}

_ASYNC_ANSWERS: dict[type, Callable[[ObjectStorage, Any], Awaitable[Any]]] = {
    Get: ObjectStorage._aget,
    GetRanges: ObjectStorage._aget_ranges,
    Create: ObjectStorage._aput,
    PutIf: ObjectStorage._aput,
    Append: ObjectStorage._aput,
    Delete: ObjectStorage._adelete,
    List: ObjectStorage._alist,
    Enclosing: ObjectStorage._aenclosing,
    OpenUpload: ObjectStorage._aopen_upload,
    UploadPart: ObjectStorage._aupload_part,
    FinishUpload: ObjectStorage._afinish_upload,
    AbortUpload: ObjectStorage._aabort_upload,
}


def _client_environment() -> dict[str, Any]:
    """The options of the HTTP client that the environment sets: obstore forgets them where it is given any."""
    found: dict[str, Any] = {}
    for name in _CLIENT_VARIABLES:
        for prefix in ("AWS_", "GOOGLE_", "AZURE_"):
            value = os.environ.get(prefix + name)
            if value is not None:
                found[name.lower()] = value.strip().lower() in ("1", "true", "yes", "on") if "ALLOW" in name else value
    return found


class _Aborted(Exception):
    """What an upload is left with."""


def _unless(request: Get) -> obstore.GetOptions | None:
    return {"if_none_match": request.unless.etag} if isinstance(request.unless, ObjectTag) else None


def _body(request: Create | PutIf | Append) -> bytes:
    return b"".join([*request.old, request.new]) if isinstance(request, Append) else request.body


def _condition(request: Create | PutIf | Append) -> dict[str, Any]:
    tag = None if isinstance(request, Create) else request.tag
    if tag is None:
        return {"mode": "create", "use_multipart": False}
    if not isinstance(tag, ObjectTag):
        raise TypeError(f"{tag!r} is not a tag of this storage")
    return {"mode": tag.condition(), "use_multipart": False}


def _one_by_one(request: Delete) -> list[Delete]:
    """Where a store minds that an object is gone already, obstore stops at it and leaves the others."""
    return [Delete([key]) for key in request.keys] if len(request.keys) > 1 else []


# Ranges are merged here, as obstore would merge them, and not by obstore: when a merged range starts inside the object
# and one of those in it past the end, obstore panics (a `BaseException`, and a backtrace on stderr).


def _spans(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges to ask for: in order, apart by more than `_COALESCE`, none empty."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if spans and start - spans[-1][1] <= _COALESCE:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((start, end))
    return spans


def _cut(spans: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    return [(start, min(end, size)) for start, end in spans if start < size]


def _starts_and_ends(spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    return {"starts": [start for start, _ in spans], "ends": [end for _, end in spans]}


def _slices(ranges: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], bodies: Sequence[Any]) -> list[bytes]:
    """What was asked for, out of what was fetched. A range past the end of the object has no bytes."""
    fetched = [(start, memoryview(body)) for (start, _), body in zip(spans, bodies, strict=True)]

    def slice_of(start: int, end: int) -> Iterator[bytes]:
        for at, body in fetched:
            if at <= start < at + len(body):
                yield bytes(body[start - at : max(start, end) - at])

    return [next(slice_of(start, end), b"") for start, end in ranges]


def _is_past_the_end(error: Exception) -> bool:
    """Whether a range was refused because the object ends before it begins."""
    text = str(error)
    return "status code: 416" in text or ("non-2xx" not in text and "HTTP error" not in text)


def _code(text: str) -> str | None:
    found = _CODE.search(text)
    return found[1] if found else None


def _first_line(error: BaseException) -> str:
    """obstore's messages carry the whole response and a dump of the error after the first line."""
    return str(error).split("\n", 1)[0].strip().removesuffix(': <?xml version="1.0" encoding="utf-8"?>')
