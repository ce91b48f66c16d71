"""Address of an engine server, with the variable that holds its key.

    http://10.0.0.1:30000                       the key given for all, else HARNESS_ENGINE_KEY, else none
    http://10.0.0.1:30000#key=WORKER_A_KEY      the key in the environment variable WORKER_A_KEY

Addresses appear in logs and reports, so they never contain a secret.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from harness.credentials import has_userinfo
from harness.errors import ScenarioError

ENGINE_KEY = "HARNESS_ENGINE_KEY"
"""Variable with the key of servers that have none of their own."""

_KEY_OF_ITS_OWN = re.compile(r"key=([A-Za-z_][A-Za-z0-9_]*)")


class EngineAddress(NamedTuple):
    url: str
    """`http://host:port[/path]` without trailing slash or secret."""
    key_variable: str = ""
    """Variable with the server's own key; may be empty."""

    @classmethod
    def parse(cls, text: str) -> "EngineAddress":
        """Parse `text`. Raises `ScenarioError` if it is not an HTTP address."""
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
        """Return the key or ""; `given` is for servers without one. Raises `ScenarioError` for an unset variable."""
        if not self.key_variable:
            return given or environ.get(ENGINE_KEY, "")
        if not environ.get(self.key_variable):
            raise ScenarioError(f"{self.url}: expected its key in the variable {self.key_variable}, which is not set")
        return environ[self.key_variable]

    def behind(self, url: str) -> str:
        """Return this server's address, reached through `url`."""
        return f"{url}#key={self.key_variable}" if self.key_variable else url
