"""The script of a session: the words that its turns say, on an engine that says what it is told to.

A request says the step behind that of the turn it continues, and the first one where it continues none: side calls of
an agent and siblings are no steps of their own. There is no step behind the last one, and no turn that the model ends
by itself: when the steps are used up, the session refuses (`script_ended`). Nothing is ever sampled in place of a step.

A step is ids, made once when the session is created: a turn that was cut goes on with the rest of them, in another
process and after an update of the tokenizer's library too. The words of a script are not those of the policy,
so its tokens are never trained, however real their logprobs are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.errors import ScriptEnded
from harness.types import SamplingParams, Turn


@dataclass(frozen=True, slots=True)
class Step:
    """The words of one turn."""

    ids: tuple[int, ...]
    """At least one."""
    ends_turn: bool
    """The last id is an end of the model's own; without it the turn is cut behind its last id, as by its budget."""

    def plan(self, params: SamplingParams) -> SamplingParams:
        """`params` for saying this step: the same limits, and nothing that would forbid one of its tokens."""
        return replace(
            params,
            max_new_tokens=min(params.max_new_tokens, len(self.ids)),
            min_new_tokens=0,
            json_schema=None,
            # An engine that takes another id for the end of a turn would go on, and nobody has told it how.
            stop_token_ids=(*params.stop_token_ids, *(self.ids[-1:] if self.ends_turn else ())),
        )


Script = tuple[Step, ...]


def next_step(script: Sequence[Step], parent: Turn | None) -> int:
    """Index of the step that a turn behind `parent` says. Raises `ScriptEnded`."""
    index = 0 if parent is None or parent.script_step is None else parent.script_step + 1
    if index >= len(script):
        raise ScriptEnded(f"the script of the session has {len(script)} steps, and this branch has said all of them")
    return index
