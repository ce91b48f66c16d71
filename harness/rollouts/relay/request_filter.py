"""The requests of one connection, of which only model calls of one session pass. Sans-IO.

Nothing is passed on as it came: a request is parsed, checked and rewritten, so that relay and session server cannot
disagree where it ends. A request before the answer to the last one is refused, too.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, HttpResponseParser

_HEAD_BYTES = 1 << 16
_METHODS = (b"GET", b"HEAD", b"POST")
_LIVENESS = (b"GET", b"HEAD")  # clients look whether a server listens at the base URL
_LOOPBACK = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_PATH = re.compile(rb"(/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~!$&'()*+,=:@-]+)+/?")  # no escapes, no `.`, no empty parts
_OF_CALLS = re.compile(rb"/(v[0-9][a-z0-9]*|api)(/|$)")  # operators' routes lie next to these
_QUERY = re.compile(rb"[!-~]*")
_VALUE = re.compile(rb"[\t -~\x80-\xff]*")
_FRAMING = (b"content-length", b"transfer-encoding")
_CHUNKED = b"chunked"
_BETWEEN_NEIGHBORS = (
    *(b"connection", b"host", b"http2-settings", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
)


def refusal_answer(reason: str) -> bytes:
    """Return the whole answer to a refused request."""
    error = {"message": f"the relay refused this request: {reason}", "type": "permission_error", "code": "not_relayed"}
    body = json.dumps({"error": error}).encode()
    head = "HTTP/1.1 403 Forbidden\r\ncontent-type: application/json\r\nx-should-retry: false\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class _Head(NamedTuple):
    method: bytes
    version: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    """Lower-case names, and values."""


class RequestFilter:
    """Filter for one connection to the session at `base_url`."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self._base, self._host = parts.path.encode(), parts.netloc.encode()
        self._parser = HttpRequestParser(self)
        self._answers = _AnswerEnds(self._note_answer)
        self._out: list[bytes] = []
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = self._beside_body_bytes = 0
        self._is_chunked = False
        self.refusal: str | None = None
        """Reason why the connection passes nothing any more."""
        self.is_answered = True
        """True if no answer is due to a request that passed."""

    def feed(self, data: bytes) -> bytes:
        """Return what to send to the server for `data` of the client."""
        try:
            if self.refusal is None:
                self._parse(data)
        except HttpParserError as error:
            self._refuse(f"expected HTTP/1.1, got {error}")
        out, self._out = b"".join(self._out), []
        return out

    def feed_answer(self, data: bytes) -> None:
        """Follow `data` of the server. Raises `ConnectionError` if it is not HTTP."""
        self._answers.feed(data)

    def _parse(self, data: bytes) -> None:
        # The parser hands a line out when it is complete, and copies its beginning for each piece until then.
        self._beside_body_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as offer:
            if self.refusal is not None or not self._is_declined:
                self._refuse("expected no other protocol")
                return
            # The server declines too, but the parser would take the body for the other protocol.
            version = self._parser.get_http_version().encode()
            head = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._target, version)]
            head += [b"%b: %b" % each for each in self._headers if each[0] != b"upgrade"]
            self._parser = HttpRequestParser(self)
            self._begin()
            self._parse(b"\r\n".join((*head, b"", b"")) + data[offer.args[0] :])
        if self._beside_body_bytes > _HEAD_BYTES:
            self._refuse(f"expected at most {_HEAD_BYTES} bytes without a body's")

    # Called by the parser

    def on_url(self, part: bytes) -> None:
        if not self.is_answered:
            self._refuse("expected no request before the answer to the last one")
        self._target += part
        self._bound_head(len(part))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        self._bound_head(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        if self.refusal is not None or self._is_declined:
            return
        method = self._parser.get_method()
        head = _Head(method, self._parser.get_http_version(), self._target, self._headers)
        reason = _reason_against(head, self._base, self._host)
        if reason is not None:
            self._refuse(reason)
            return
        self.is_answered = False
        self._answers.expect(is_head=method == b"HEAD")
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in self._headers)
        ends = () if self._parser.should_keep_alive() else ((b"connection", b"close"),)
        passed = [each for each in self._headers if each[0] not in _BETWEEN_NEIGHBORS]
        lines = [b"%b: %b" % each for each in ((b"host", self._host), *passed, *ends)]
        self._out.append(b"\r\n".join((b"%b %b HTTP/1.1" % (method, self._target), *lines, b"", b"")))

    def on_body(self, body: bytes) -> None:
        self._beside_body_bytes = 0
        if self.refusal is None:
            self._out.append(b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body)

    def on_message_complete(self) -> None:
        if self._is_declined:
            return
        if self.refusal is None and self._is_chunked:
            self._out.append(b"0\r\n\r\n")  # without the trailers, which count as headers of nothing
        self._begin()

    @property
    def _is_declined(self) -> bool:
        is_needed = self._parser.get_method() == b"CONNECT" or _asks_for_websocket(self._headers)
        return self._parser.should_upgrade() and not is_needed

    def _begin(self) -> None:
        self._target, self._headers, self._is_chunked = b"", [], False
        self._head_bytes = self._beside_body_bytes = 0

    def _bound_head(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > _HEAD_BYTES:
            self._refuse(f"expected a head of at most {_HEAD_BYTES} bytes")
            self._target, self._headers = b"", []

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def _note_answer(self) -> None:
        self.is_answered = True


def _reason_against(request: _Head, base: bytes, host: bytes) -> str | None:
    path, _, query = request.target.partition(b"?")
    below, names = path.removeprefix(base), [name for name, _ in request.headers]
    hosts = [value for name, value in request.headers if name == b"host"]
    encoding = dict(request.headers).get(b"transfer-encoding", _CHUNKED)
    is_call = _OF_CALLS.match(below) is not None
    is_liveness = (below == b"/" and request.method in _LIVENESS) or (below == b"" and request.method == b"HEAD")
    rules = (
        (request.method in _METHODS and request.version == "1.1", "expected GET, HEAD or POST in HTTP/1.1"),
        (_PATH.fullmatch(path) and _QUERY.fullmatch(query), "expected a plain path without escapes"),
        (path.startswith(base) and (is_call or is_liveness), "expected a model call below the session's own URL"),
        (len(hosts) == 1 and (hosts[0] == host or _LOOPBACK.fullmatch(hosts[0])), "expected one `Host`, this address"),
        (not _asks_for_websocket(request.headers), "expected no other protocol"),
        (sum(name in _FRAMING for name in names) <= 1 and encoding == _CHUNKED, "expected one length, or chunks"),
        (all(_VALUE.fullmatch(value) for _, value in request.headers), "expected no control characters in headers"),
    )
    return next((reason for holds, reason in rules if not holds), None)


def _asks_for_websocket(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"upgrade" and b"websocket" in value.lower() for name, value in headers)


class _AnswerEnds:
    """Reader that notices where answers end."""

    def __init__(self, note_end: Callable[[], None]) -> None:
        self._note_end = note_end
        self._is_head = self._has_head = False
        self._parser = HttpResponseParser(self)

    def expect(self, *, is_head: bool) -> None:
        self._is_head, self._has_head = is_head, False

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            raise ConnectionError(f"expected an HTTP answer, got {error}") from error
        if self._is_head and self._has_head:
            # The parser waits for the body that the length announces, and an answer to HEAD has none.
            self._parser = HttpResponseParser(self)
            self._note_end()

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200 and not self._is_head:
            self._note_end()
