"""A proxy in front of an S3 server that counts requests, slows them down, and loses them on purpose.

Rules of this module:

- It speaks just enough HTTP/1.1 for an S3 client: bodies by length or in chunks, connections kept alive.
- It knows nothing of checkpoints. What happens to which request is said by `Rule`s.
- It runs on an event loop in a thread of its own; what the caller reads (`requests`) and changes (`rules`,
  `delay`) may be touched at any time.
"""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType


class Fault(Enum):
    """What may happen to a request on the way."""

    LOSE_REQUEST = auto()
    """It never reaches the server; the connection breaks."""
    LOSE_ANSWER = auto()
    """The server does it; the connection breaks before the answer arrives."""
    IGNORE_CONDITION = auto()
    """It arrives without its If-Match and If-None-Match, as if the store knew nothing of them."""
    DROP_ETAG = auto()
    """The server does it, and its answer arrives without the header ETag."""


@dataclass(frozen=True)
class Answer:
    """An error of S3's own in place of the server's answer: `Answer(503, "SlowDown")`. Nothing is done."""

    status: int
    code: str
    message: str = "made up by the test"

    def body(self) -> bytes:
        return (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{self.code}</Code>'
            f"<Message>{self.message}</Message><RequestId>0</RequestId></Error>"
        ).encode()


@dataclass
class Request:
    """One request, and what became of it.

    Attributes:
        method: `GET`, `PUT`, ...
        bucket: The bucket.
        key: The key of the object in the bucket; empty for requests about the bucket, such as listings.
        query: The parameters, as in `{"list-type": "2"}`.
        headers: The headers, names in lower case.
        bytes_in: Length of its body.
        status: The answer's status, or 0 while there is none or when the answer was lost.
        bytes_out: Length of the answer's body.
        fault: What a rule did to it, or `None`.
        began: When it arrived, by `time.monotonic()`, in seconds.
        ended: When its answer left, likewise; 0.0 before.
    """

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    bytes_in: int
    status: int = 0
    bytes_out: int = 0
    fault: Fault | Answer | None = None
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    @property
    def conditional_write(self) -> bool:
        """Whether it is a write that depends on what is stored."""
        return self.method in ("PUT", "POST") and ("if-match" in self.headers or "if-none-match" in self.headers)


@dataclass
class Rule:
    """What happens to which requests. The first rule that applies to a request decides.

    Attributes:
        fault: What happens.
        when: Which requests are meant; all, unless given. It is called once for each request.
        every: Only each so-and-so-many-th of the requests meant: 1 is each of them.
        times: Retire after so many faults; never, unless given.

    Example:
        proxy.rules.append(Rule(Fault.LOSE_ANSWER, when=lambda request: request.conditional_write, every=3))
    """

    fault: Fault | Answer
    when: Callable[[Request], bool] = lambda request: True
    every: int = 1
    times: int | None = None
    met: int = 0
    applied: int = 0

    def applies(self, request: Request) -> bool:
        """Whether this request is hit; counts it."""
        if self.times is not None and self.applied >= self.times:
            return False
        if not self.when(request):
            return False
        self.met += 1
        if self.met % self.every:
            return False
        self.applied += 1
        return True


class S3Proxy:
    """A proxy that is running while its `with` block is.

    Args:
        upstream: Address of the server, as in `http://127.0.0.1:54321`.
        delay: Seconds by which each request is held before it is passed on.

    Attributes:
        endpoint: The proxy's own address.
        requests: Every request so far, in order of arrival.
        rules: What goes wrong. Empty at first.
        delay: As above; may be changed.

    Example:
        with S3Proxy(moto.endpoint, delay=0.02) as proxy:
            saver = LSMSaver.from_conn_string("s3://bucket", store_options=store_options(proxy.endpoint))
            ...
            assert len(proxy.requests) == 2
    """

    def __init__(self, upstream: str, *, delay: float = 0.0) -> None:
        address = urllib.parse.urlsplit(upstream)
        assert address.hostname is not None
        assert address.port is not None
        self._upstream = (address.hostname, address.port)
        self.delay = delay
        self.requests: list[Request] = []
        self.rules: list[Rule] = []
        self.endpoint = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="s3-proxy", daemon=True)

    def __enter__(self) -> S3Proxy:
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = starting.result(10)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def clear(self) -> None:
        """Forget the requests so far."""
        self.requests.clear()

    async def _stop(self) -> None:
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client went away between or within requests, or the proxy ends
        finally:
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request on and its answer back. Answers whether the connection lives on."""
        line, headers = _split_head(await reader.readuntil(b"\r\n\r\n"))
        method, target, _ = line.split(" ", 2)
        names = {name.lower(): value for name, value in headers}
        if names.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _read_body(reader, names, until_closed=False)
        path, _, query = target.partition("?")
        bucket, _, key = path.lstrip("/").partition("/")
        request = Request(
            method,
            urllib.parse.unquote(bucket),
            urllib.parse.unquote(key),
            dict(urllib.parse.parse_qsl(query, keep_blank_values=True)),
            names,
            len(body),
        )
        rule = next((rule for rule in list(self.rules) if rule.applies(request)), None)
        request.fault = rule.fault if rule is not None else None
        self.requests.append(request)
        if self.delay:
            await asyncio.sleep(self.delay)

        dropped = {"connection", "expect", "transfer-encoding", "content-length"}
        answer_headers: list[tuple[str, str]]
        match request.fault:
            case Fault.LOSE_REQUEST:
                return False
            case Answer(status=status):
                reason, answer_headers, answer = "Made Up", [("Content-Type", "application/xml")], request.fault.body()
            case fault:
                if fault is Fault.IGNORE_CONDITION:
                    dropped |= {"if-match", "if-none-match"}
                passed_on = [(name, value) for name, value in headers if name.lower() not in dropped]
                status, reason, answer_headers, answer = await self._ask(method, target, passed_on, body)
                if fault is Fault.LOSE_ANSWER:
                    return False

        request.status, request.bytes_out, request.ended = status, len(answer), time.monotonic()
        dropped = {"connection", "transfer-encoding"} | (set() if method == "HEAD" else {"content-length"})
        if request.fault is Fault.DROP_ETAG:
            dropped.add("etag")
        kept = [(name, value) for name, value in answer_headers if name.lower() not in dropped]
        if method != "HEAD":
            kept.append(("Content-Length", str(len(answer))))
        writer.write(_join_head(f"HTTP/1.1 {status} {reason}", kept) + answer)
        await writer.drain()
        return names.get("connection", "").lower() != "close"

    async def _ask(
        self, method: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, str, list[tuple[str, str]], bytes]:
        """Send a request to the server, on a connection of its own, and read the answer."""
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            own = [("Connection", "close"), ("Content-Length", str(len(body)))]
            writer.write(_join_head(f"{method} {target} HTTP/1.1", headers + own) + body)
            await writer.drain()
            line, answer_headers = _split_head(await reader.readuntil(b"\r\n\r\n"))
            _, status, reason = (line + " ").split(" ", 2)
            names = {name.lower(): value for name, value in answer_headers}
            bodyless = method == "HEAD" or status in ("204", "304")
            answer = b"" if bodyless else await _read_body(reader, names, until_closed=True)
            return int(status), reason.strip(), answer_headers, answer
        finally:
            writer.close()


def _split_head(head: bytes) -> tuple[str, list[tuple[str, str]]]:
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first, [(name, value.strip()) for name, _, value in pairs]


def _join_head(first: str, headers: list[tuple[str, str]]) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str], *, until_closed: bool) -> bytes:
    """The body that these headers announce; a server may also end it by closing the connection."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readline()
        while (await reader.readline()).strip():
            pass  # trailers
        return body
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read() if until_closed else b""
