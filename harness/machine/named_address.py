"""Connect to a server by name, trying each address.

A silent address, such as a firewalled IPv6, costs only its share of the time. The last one that answered comes first.
"""

import asyncio
import ssl
from collections.abc import Callable
from errno import EMFILE
from functools import cache
from socket import SOCK_STREAM
from typing import TypeVar
from urllib.parse import urlsplit

CONNECT_S = 10.0

_KEPT_S = 10.0  # a name may resolve to other addresses later

# Shared: loading the certificates takes longer than a call.
_tls_context = cache(ssl.create_default_context)

_P = TypeVar("_P", bound=asyncio.Protocol)


class NamedAddress:
    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._tls = _tls_context() if self._url.scheme == "https" else None
        self._hosts: list[str] = []
        self._known_until = 0.0
        self._answered = ""
        self._resolving = asyncio.Lock()

    async def connect(self, make: Callable[[], _P]) -> _P:
        """Connect a protocol. Raises the last `OSError` or `TimeoutError`, and `ValueError` for a bad port."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + CONNECT_S
        port = self._url.port or (80 if self._tls is None else 443)
        name = None if self._tls is None else self._url.hostname
        failure: OSError = TimeoutError()
        hosts = await self._resolve(port)
        for index, host in enumerate(hosts):
            now = loop.time()
            try:
                async with asyncio.timeout_at(now + (ends_at - now) / (len(hosts) - index)):
                    _, protocol = await loop.create_connection(make, host, port, ssl=self._tls, server_hostname=name)
            except OSError as error:
                failure = error
                if error.errno == EMFILE:
                    break
            else:
                self._answered = host
                return protocol
        raise failure

    async def _resolve(self, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        async with self._resolving:
            if loop.time() >= self._known_until:
                found = await loop.getaddrinfo(self._url.hostname or "", port, type=SOCK_STREAM)
                self._hosts = list(dict.fromkeys(str(where[0]) for *_, where in found))
                self._known_until = loop.time() + _KEPT_S
        return sorted(self._hosts, key=lambda host: host != self._answered)
