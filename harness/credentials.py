"""Credentials that stand in URLs: `https://user:secret@host/`. Pure.

Package indexes and proxies are often configured like that. A value is passed on without them; an address of ours with
some is refused where it is read, and never shown.
"""

import re
from collections.abc import Mapping

_IN_URL = re.compile(r"(://)[^/?#\s]*@")
_IN_PROXY = re.compile(r"(^|://)[^/?#\s]*@")  # curl and others take a proxy without a scheme


def without_userinfo(text: str) -> str:
    """`text` with every `user:secret@` behind a `://` removed."""
    return _IN_URL.sub(r"\1", text)


def has_userinfo(url: str) -> bool:
    """Whether there is a user or a secret in `url`."""
    return _IN_URL.search(url) is not None


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` without user and secret of the URLs in their values."""
    return {
        name: _IN_PROXY.sub(r"\1", value) if name.lower().endswith("_proxy") else without_userinfo(value)
        for name, value in environ.items()
    }
