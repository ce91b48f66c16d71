"""Script of a session: the words of its turns, on an engine that can force tokens.

A turn says the step after its parent's, a root the first; siblings and side calls use up no step. After the last step
the session refuses (`script_ended`). Script tokens are never trained: the policy did not choose them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.errors import ScriptEnded
from harness.types import SamplingParams, Turn


@dataclass(frozen=True, slots=True)
class Step:
    """Words of one turn."""

    ids: tuple[int, ...]
    ends_turn: bool
    """The last id ends the turn, else the turn is cut there."""

    def plan(self, params: SamplingParams) -> SamplingParams:
        """Return `params` that allow the step's tokens."""
        return replace(
            params,
            max_new_tokens=min(params.max_new_tokens, len(self.ids)),
            min_new_tokens=0,
            json_schema=None,
            # An engine with other end-of-turn ids would continue, without ids to say.
            stop_token_ids=(*params.stop_token_ids, *(self.ids[-1:] if self.ends_turn else ())),
        )


# Ids, fixed at creation: a cut turn continues in another process, or after an update of the tokenizer's library.
Script = tuple[Step, ...]


def next_step(script: Sequence[Step], parent: Turn | None) -> int:
    """Return the index of the step after `parent`'s. Raise `ScriptEnded`."""
    index = 0 if parent is None or parent.notes.script_step is None else parent.notes.script_step + 1
    if index >= len(script):
        raise ScriptEnded(f"the script of the session has {len(script)} steps, and this branch has said all of them")
    return index
