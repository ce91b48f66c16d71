"""Foreign text on a terminal: it must not move the cursor or fill the screen."""

_MOST = 10_000  # characters


def printable(text: str) -> str:
    """Escape unprintable characters but line breaks and tabs, and truncate."""
    shown = text if len(text) <= _MOST else f"{text[:_MOST]}..."
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in shown)
