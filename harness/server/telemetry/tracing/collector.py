"""An OpenTelemetry collector that takes OTLP spans over HTTP, as JSON.

One POST at a time, with a deadline, ignoring proxies and redirects since headers may hold a key. No answer raises. As
in the protocol, 429, 502, 503, 504 and a broken connection allow a retry, other failures do not.
"""

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import StrEnum
from html import escape
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import msgspec

from harness.credentials import has_userinfo
from harness.errors import ScenarioError
from harness.server.telemetry.printable import printable

if TYPE_CHECKING:
    import aiohttp

HEADERS_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
"""Variables of OpenTelemetry's specification; the first that is set holds the headers."""

NO_KEYS = re.compile(r"(?!)")
"""Pattern that finds nothing."""

_TRACES_PATH = "/v1/traces"
_AGAIN = frozenset({429, 502, 503, 504})
_MOST_BYTES = 1 << 16  # of an answer; a longer one is none of OTLP's
_MOST_WORDS = 200  # characters of it in the log
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~")


class DeliveryVerdict(StrEnum):
    """Result of a POST for its spans."""

    TAKEN = "taken"
    """The collector has them, all but `Answer.rejected`."""
    AGAIN = "again"
    """The collector may take them later."""
    REFUSED = "refused"
    """The collector will never take them."""


class Answer(NamedTuple):
    """Result of a POST."""

    verdict: DeliveryVerdict
    trouble: str = ""
    """Failure, in the same words each time; empty on success."""
    detail: str = ""
    """Detail for the log."""
    rejected: int = 0
    """Spans refused for good."""
    wait_s: float | None = None
    """Pause that the collector requests."""


def traces_url(endpoint: str) -> str:
    """Return the traces URL, appending `/v1/traces` if missing.

    Raises `ScenarioError` for a bad address or one with a secret.
    """
    try:
        parts = urlsplit(endpoint)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, or no IPv6 address
        has_host = False
    if "@" in endpoint or has_userinfo(endpoint):  # never shown
        raise ScenarioError(
            f"--otlp: expected an address without a user or a secret in it; {HEADERS_VARIABLES[1]} has the headers"
        )
    is_plain = all(char.isprintable() and not char.isspace() for char in endpoint)
    if not has_host or not is_plain or parts.scheme not in ("http", "https") or "?" in endpoint or "#" in endpoint:
        raise ScenarioError(
            f"--otlp: expected the address of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318;"
            f" got {endpoint!r}"
        )
    base = endpoint.rstrip("/")
    return base if base.endswith(_TRACES_PATH) else base + _TRACES_PATH


def read_headers(environ: Mapping[str, str]) -> dict[str, str]:
    """Parse the collector's headers, `name=value,...`, percent-encoded. Raises `ScenarioError`, without content."""
    variable = next((name for name in HEADERS_VARIABLES if environ.get(name)), None)
    headers: dict[str, str] = {}
    for pair in environ[variable].split(",") if variable else ():
        name, is_pair, value = pair.partition("=")
        name, value = name.strip(), unquote(value.strip())
        if not pair.strip():
            continue
        if not is_pair or not name or not _NAME.issuperset(name) or not (value.isascii() and value.isprintable()):
            raise ScenarioError(
                f"{variable}: expected NAME=VALUE,... with values percent-encoded, as OpenTelemetry has it"
            )
        headers[name.lower()] = value
    return headers


def find_keys(headers: Mapping[str, str]) -> re.Pattern[str]:
    """Return a pattern for the words of `headers`, raw or as JSON, HTML and URLs encode them.

    A collector may echo what it was sent.
    """
    words = {word for value in headers.values() for word in value.split()}
    written = (
        (word, msgspec.json.encode(word)[1:-1].decode(), word.replace("/", "\\/"), escape(word), quote(word, safe=""))
        for word in words
    )
    forms = sorted({form for each in written for form in each}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, forms))) if forms else NO_KEYS


def judge_answer(status: int, content: bytes, retry_after: str, now: float, keys: re.Pattern[str] = NO_KEYS) -> Answer:
    """Interpret a collector's answer at Unix second `now`, redacting what `keys` finds."""
    text = content.decode("utf-8", "replace")
    if status in _AGAIN:
        return Answer(DeliveryVerdict.AGAIN, f"answered {status}", _words(text, keys), wait_s=_wait_s(retry_after, now))
    if not 200 <= status < 300:
        return Answer(DeliveryVerdict.REFUSED, f"answered {status}", _words(text, keys))
    try:
        said = msgspec.json.decode(content, type=_Response, strict=False) if content else _Response()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # A success without OTLP in it: perhaps another kind of server.
        return Answer(DeliveryVerdict.TAKEN, "answered with what is no OTLP", _words(text, keys))
    partial = said.partial_success or _PartialSuccess()
    if partial.rejected_spans > 0:
        rejected = "rejected some of the spans"
        return Answer(DeliveryVerdict.TAKEN, rejected, _words(partial.error_message, keys), partial.rejected_spans)
    return Answer(DeliveryVerdict.TAKEN)


@dataclass(slots=True)
class SpanCollector:
    """SpanCollector at `url` (`traces_url`); `timeout_s` limits each request."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 10.0
    _http: "aiohttp.ClientSession | None" = field(default=None, init=False, repr=False)
    _keys: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._keys = find_keys(self.headers)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[None]:
        """Allow posts in the block."""
        import aiohttp  # here and not during a turn; servers without spans may not need it

        connector = aiohttp.TCPConnector(limit=1, ssl=_tls_context() if self.url.startswith("https:") else True)
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={**self.headers, "content-type": "application/json", "user-agent": "session-harness"},
            auto_decompress=False,  # not requested, and it could be a bomb
            trust_env=False,
        ) as self._http:
            yield

    async def post(self, body: bytes) -> Answer:
        """Send one OTLP request. Raises only on cancellation."""
        import aiohttp

        assert self._http is not None, "posts are made while it is connected"
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self._http.post(self.url, data=body, allow_redirects=False) as response,
            ):
                content = await _read(response)
                after = response.headers.get("retry-after", "")
                return judge_answer(response.status, content, after, time.time(), self._keys)
        except TimeoutError:
            return Answer(DeliveryVerdict.AGAIN, "did not answer in time", f"within {self.timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:  # the latter: an answer that is no HTTP
            return Answer(
                DeliveryVerdict.AGAIN, "cannot be reached", _words(f"{type(error).__name__}: {error}", self._keys)
            )


def _tls_context() -> ssl.SSLContext:
    import httpx  # for its certificates; slow to import

    return httpx.create_ssl_context(trust_env=False)


class _PartialSuccess(msgspec.Struct, rename="camel"):
    rejected_spans: int = 0
    error_message: str = ""


class _Response(msgspec.Struct, rename="camel"):
    partial_success: _PartialSuccess | None = None


async def _read(response: "aiohttp.ClientResponse") -> bytes:
    content = b""
    while len(content) < _MOST_BYTES and (piece := await response.content.read(_MOST_BYTES - len(content))):
        content += piece
    return content


def _wait_s(retry_after: str, now: float) -> float | None:
    text = retry_after.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, OverflowError):
        return None


def _words(text: str, keys: re.Pattern[str]) -> str:
    # Redact before truncating: half a key would not match.
    return printable(keys.sub("...", text)[:_MOST_WORDS].replace("\n", " "))
