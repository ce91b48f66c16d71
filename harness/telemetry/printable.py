"""Text that others chose, on a terminal: agents, models and clients must not move its cursor or fill it."""

_MOST = 10_000  # characters


def printable(text: str) -> str:
    """`text` with everything but line breaks and tabs that is no character to look at written as Python does, cut."""
    shown = text if len(text) <= _MOST else f"{text[:_MOST]}..."
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in shown)
