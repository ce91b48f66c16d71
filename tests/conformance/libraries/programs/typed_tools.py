"""The tools with signatures that libraries make schemas of."""

from conversation import add, look
from pydantic import BaseModel


class Place(BaseModel):
    """A place."""

    name: str
    at: list[float]
    depth: int


def note(text: str, place: Place) -> str:
    """Write a note at a place.

    Args:
        text: What it says.
        place: Where it is.
    """
    name = place["name"] if isinstance(place, dict) else place.name
    return f"Noted at {name}."


TOOLS = [look, add, note]
