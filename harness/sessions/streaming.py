"""When the text of a streamed answer goes out."""

from enum import StrEnum


class StreamingMode(StrEnum):
    """The two ways."""

    RECORDED = "recorded"
    """When the turn is durable, all of it."""
    LIVE = "live"
    """Reasoning and content as they are sampled; tool calls and the end when the turn is durable."""
