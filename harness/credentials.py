"""Credentials in URLs (`https://user:secret@host/`), command lines and comparisons. Pure.

URLs of indexes and proxies lose them before they are passed on. A harness address that contains some is refused when
read, and never shown.
"""

import re
import secrets
from collections.abc import Iterable, Mapping

_IN_URL = re.compile(r"(://)[^/?#\s]*@")
_IN_PROXY = re.compile(r"(^|://)[^/?#\s]*@")  # curl and others take a proxy without a scheme
_HIDDEN = r"(?:keys?(?![a-z])|token(?!s|iz)|secret|passw)[^=]*"  # tokens are counted, and a tokenizer is a folder
_SECRET_FOLLOWS = re.compile(rf"--?[^=]*{_HIDDEN}", re.IGNORECASE)
_SECRET_WITHIN = re.compile(rf"({_HIDDEN}=).*", re.IGNORECASE | re.DOTALL)


def without_userinfo(text: str) -> str:
    """Remove every `user:secret@` behind a `://`."""
    return _IN_URL.sub(r"\1", text)


def has_userinfo(url: str) -> bool:
    return _IN_URL.search(url) is not None


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """Remove user and secret from the URLs in the values."""
    return {
        name: _IN_PROXY.sub(r"\1", value) if name.lower().endswith("_proxy") else without_userinfo(value)
        for name, value in environ.items()
    }


def is_same(given: str, secret: str) -> bool:
    """Compare in constant time."""
    return secrets.compare_digest(given.encode(), secret.encode())


def hide_secrets(command: Iterable[str]) -> list[str]:
    """Replace values of options and variables named after a secret with `...`, and remove URL credentials."""
    shown: list[str] = []
    follows = False
    for word in command:
        shown.append("..." if follows else _SECRET_WITHIN.sub(r"\1...", without_userinfo(word)))
        follows = _SECRET_FOLLOWS.fullmatch(word) is not None
    return shown
