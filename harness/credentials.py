"""Credentials that stand in URLs (`https://user:secret@host/`) and in command lines, and those that are compared. Pure.

Package indexes and proxies are often configured like that. A value is passed on without them; an address of ours with
some is refused where it is read, and never shown.
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


def is_same(given: str, secret: str) -> bool:
    """Whether they are equal, in a time that says nothing of how far they are."""
    return secrets.compare_digest(given.encode(), secret.encode())


def hide_secrets(command: Iterable[str]) -> list[str]:
    """The words of `command` with `...` for what options and variables named after a secret are set to.

    URLs in them lose user and secret.
    """
    shown: list[str] = []
    follows = False
    for word in command:
        shown.append("..." if follows else _SECRET_WITHIN.sub(r"\1...", without_userinfo(word)))
        follows = _SECRET_FOLLOWS.fullmatch(word) is not None
    return shown
