"""Text that may be shown: foreign text must not move the cursor or fill the screen, and no log grants access.

On a server without keys a session id does, and clients write secrets anywhere. So every log line is filtered.
"""

import re
from functools import lru_cache, partial

_MOST = 10_000  # characters
_LONGEST_KNOWN = 200  # characters
_SECRET = re.compile(r"(sk-harness-|[0-9a-f]{8})[0-9a-f]{8,}", re.IGNORECASE)
_shorten = lru_cache(maxsize=1024)(partial(_SECRET.sub, r"\1…"))  # each turn names its session and its client


def printable(text: str) -> str:
    """Escape unprintable characters but line breaks and tabs, and truncate."""
    shown = text if len(text) <= _MOST else f"{text[:_MOST]}..."
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in shown)


def shorten_secrets(text: str) -> str:
    """Shorten session ids in `text` to eight digits, and remove session keys."""
    return _shorten(text) if len(text) <= _LONGEST_KNOWN else _shorten.__wrapped__(text)
