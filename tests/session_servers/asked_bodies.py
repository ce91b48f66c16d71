"""Which request body a stored turn was asked for with: its digest has a key that goes with it."""

from functools import lru_cache

from harness.dialects.model_request import WireCall
from harness.dialects.openai_chat_request import NAME, parse_request
from harness.sessions.retries import CallParts, digest_kind, earlier_digests
from harness.tokens.history import History


@lru_cache(maxsize=10_000)
def is_digest_of(content: bytes, digest: str) -> bool:
    """Whether a call of Chat Completions with this body, and no key of its own, has that digest."""
    asked = parse_request(WireCall(content))
    conversation = History().read(asked.messages, asked.tools)[-1].exact
    return digest in earlier_digests([digest_kind(digest)], CallParts(content, NAME, "", conversation))
