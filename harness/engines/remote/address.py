"""Where an engine server is, and the key that it wants.

    http://10.0.0.1:30000                       the key given for all, else that of HARNESS_ENGINE_KEY, else none
    http://10.0.0.1:30000#key=WORKER_A_KEY      the key in the environment variable WORKER_A_KEY

An address names the variable, never the key itself: addresses stand in messages, logs, reports and run directories. One
with a user or a secret in it is refused, and not repeated.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from harness.credentials import has_userinfo
from harness.errors import ScenarioError

ENGINE_KEY = "HARNESS_ENGINE_KEY"
"""The variable with the key of every engine server that has none of its own."""

_KEY_OF_ITS_OWN = re.compile(r"key=([A-Za-z_][A-Za-z0-9_]*)")


class EngineAddress(NamedTuple):
    """An engine server."""

    url: str
    """`http://host:port`, with or without a path, without a trailing slash: what may be asked and shown."""
    key_variable: str = ""
    """The environment variable with its own key; empty when it has none."""

    @classmethod
    def parse(cls, text: str) -> "EngineAddress":
        """The parts of `text`. Raises `ScenarioError` when it is no address of an HTTP server."""
        url, _, fragment = text.partition("#")
        parts = urlsplit(url)
        if "@" in parts.netloc or has_userinfo(url) or (not parts.scheme.startswith("http") and "@" in url):
            raise ScenarioError(
                "expected an engine's address without a user or a secret in it; put the key into an environment"
                f" variable: {ENGINE_KEY} for all engines, or http://HOST:PORT#key=VARIABLE for one"
            )
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ScenarioError(f"expected an address such as http://127.0.0.1:30000, got {url!r}")
        named = _KEY_OF_ITS_OWN.fullmatch(fragment)
        if fragment and named is None:
            raise ScenarioError(
                f"{url}: expected #key=VARIABLE, the name of an environment variable, behind the address"
            )
        return cls(url.rstrip("/"), named[1] if named else "")

    def api_key(self, environ: Mapping[str, str], given: str = "") -> str:
        """The key to send; empty when there is none. `given` is for servers without a key of their own.

        Raises `ScenarioError` when the variable of its own key is not set.
        """
        if not self.key_variable:
            return given or environ.get(ENGINE_KEY, "")
        if not environ.get(self.key_variable):
            raise ScenarioError(f"{self.url}: expected its key in the variable {self.key_variable}, which is not set")
        return environ[self.key_variable]

    def behind(self, url: str) -> str:
        """The address of the same server where it is reached at `url`."""
        return f"{url}#key={self.key_variable}" if self.key_variable else url
