"""Address and headers of an OpenTelemetry collector, checked before a server starts.

The SDK reads the headers itself. What is wrong with them is an error here, since the SDK would log them with their keys
and continue.
"""

import os
import re
from urllib.parse import unquote, urlsplit

from harness.credentials import has_userinfo
from harness.errors import ScenarioError

HEADERS_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
"""Variables of OpenTelemetry's specification; the first that is set holds the headers."""

_TRACES_PATH = "/v1/traces"
_HEADER = re.compile(r"[\w!#$&'*+.^`|~-]+\s*=[^\",;\\]*", re.ASCII)  # what the SDK takes


def check_collector(endpoint: str) -> None:
    """Check that spans can be sent to `endpoint`. Raises `ScenarioError`."""
    traces_url(endpoint)
    variable = next((name for name in HEADERS_VARIABLES if os.environ.get(name)), None)
    for header in os.environ[variable].split(",") if variable else ():
        text = unquote(header.strip())
        if text and not (_HEADER.fullmatch(header.strip()) and text.isascii() and text.isprintable()):
            raise ScenarioError(
                f"{variable}: expected NAME=VALUE,... with values percent-encoded, as OpenTelemetry has it"
            )
    try:
        import harness.server.telemetry.tracing.sender  # noqa: F401  # the SDK is slow to import, and optional
    except ImportError:
        raise ScenarioError("--otlp needs `pip install 'session-harness[otel]'`") from None


def traces_url(endpoint: str) -> str:
    """Return the traces URL, appending `/v1/traces` if missing. Raises `ScenarioError` for bad or secret addresses."""
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
