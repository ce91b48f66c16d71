"""The text of a reply that is said before the whole of it is known."""

from hypothesis import strategies as st

from harness.tokens.parsing import Delta
from harness.types import Message


@st.composite
def said_of(draw: st.DrawFn, reply: Message) -> list[Delta]:
    """Deltas that a live stream may have had: some of the reasoning, or all of it and some of the content."""
    reasoning, content = reply.get("reasoning_content") or "", reply.get("content") or ""
    said = draw(st.integers(0, len(reasoning) + len(content)))
    deltas, position = [], 0
    while position < said:
        end = min(said, position + draw(st.integers(1, 80)))
        of_content = content[max(0, position - len(reasoning)) : max(0, end - len(reasoning))]
        deltas.append(Delta(reasoning[position:end], of_content))
        position = end
    return deltas
