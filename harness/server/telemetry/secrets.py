"""Keys and session ids in logs: enough to tell two apart, too little to use.

On a server without keys a session id grants access, and clients write secrets anywhere. So every log line is filtered.
"""

import re

_SECRET = re.compile(r"(sk-harness-|[0-9a-f]{8})[0-9a-f]{8,}", re.IGNORECASE)


def shorten_secrets(text: str) -> str:
    """Shorten session ids in `text` to eight digits, and remove session keys."""
    return _SECRET.sub(r"\1…", text)
