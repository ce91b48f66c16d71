"""The guard inside a scheduler: one `Watch` per request, shown the output after every step.

A watch counts what it has seen itself, so it does not matter how many tokens a step adds (speculative decoding), or
whether the request was preempted in between: no token is looked at twice, none is missed. It decides where an output
has to end; the engine's module ends it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from server_patch.repeat_terminate.config import RepeatTerminateConfig
from server_patch.repeat_terminate.detector import RepeatDetector
from server_patch.repeat_terminate.signals import is_probe, prefix_length


@dataclass
class Guard:
    """The part that all watches of one server share."""

    config: RepeatTerminateConfig
    digest: str
    object_key_ids: Sequence[int] | None = None
    """Known once the server has loaded its tokenizer; needed only when the configuration counts object keys."""

    def watch(self, prompt_ids: Sequence[int] | None, arguments: object) -> "Watch":
        """The watch of a new request; `arguments` is what the request says beside its sampling parameters."""
        prompt = prompt_ids or ()
        length = prefix_length(arguments, len(prompt))
        return Watch(self, prompt[len(prompt) - length :], is_probe=is_probe(arguments))


class Watch:
    """The guard's view of one request."""

    __slots__ = ("_guard", "_hit", "_prefix", "_push", "_seen", "is_probe")

    def __init__(self, guard: Guard, prefix: Sequence[int], *, is_probe: bool) -> None:
        self._guard = guard
        self._prefix = prefix
        self.is_probe = is_probe
        """The request asks which configuration the guard runs."""
        self._push = self._detector().push
        self._seen = 0
        self._hit: int | None = None

    def hit(self, output_ids: Sequence[int]) -> int | None:
        """How many tokens of the output there are up to the one that triggered; None while none has."""
        size = len(output_ids)
        if size < self._seen:  # the engine took its output back, for a session's next turn or for a recomputation
            self._push, self._seen, self._hit = self._detector().push, 0, None
        while self._seen < size and self._hit is None:
            token = output_ids[self._seen]
            self._seen += 1
            if self._push(token):
                self._hit = self._seen
        return self._hit

    def _detector(self) -> RepeatDetector:
        detector = RepeatDetector(self._guard.config, self._guard.object_key_ids)
        detector.seed(self._prefix)
        return detector
