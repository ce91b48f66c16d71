"""The guard inside a scheduler: one `Watch` per request, shown the output after every step.

It counts what it has seen, so speculative decoding and preemption neither skip nor repeat a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server_patch.repeat_terminate.config import RepeatTerminateConfig
from server_patch.repeat_terminate.detector import RepeatDetector
from server_patch.repeat_terminate.signals import MARK, is_probe, prefix_length


@dataclass
class Guard:
    config: RepeatTerminateConfig
    digest: str
    object_key_ids: Sequence[int] | None = None
    """Ids of the object key, once the tokenizer is loaded."""

    def watch(self, prompt_ids: Sequence[int] | None, arguments: object) -> "Watch":
        prompt = prompt_ids or ()
        length = prefix_length(arguments, len(prompt))
        return Watch(self, prompt[len(prompt) - length :], is_probe=is_probe(arguments))

    def watch_of(self, request: Any, prompt_ids: Sequence[int] | None, arguments: object) -> "Watch":
        """Return the watch of an engine's `request`, which keeps it."""
        if not hasattr(request, MARK):
            setattr(request, MARK, self.watch(prompt_ids, arguments))
        watch: Watch = getattr(request, MARK)
        return watch


class Watch:
    __slots__ = ("_guard", "_hit", "_prefix", "_push", "_seen", "is_probe")

    def __init__(self, guard: Guard, prefix: Sequence[int], *, is_probe: bool) -> None:
        self._guard = guard
        self._prefix = prefix
        self.is_probe = is_probe
        self._push = self._detector().push
        self._seen = 0
        self._hit: int | None = None

    def hit(self, output_ids: Sequence[int]) -> int | None:
        """Return the output length at the triggering token, or None."""
        size = len(output_ids)
        if size < self._seen:  # the engine discarded output, for a session's next turn or a recomputation
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
