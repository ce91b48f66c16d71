"""The label of the weights that one worker serves, learned from every answer that names it.

Answers arrive in another order than they were given: a request that began before an update ends after it, and of two
looks the earlier one may come in last. So each answer is weighed against what was known when it was asked for. An
answer that was asked for after the present label had been heard is newer than it, whatever it says: a worker that was
started again goes back to its first label. One that was asked for before can only move the label on, never back.
"""

from harness.samples.versions import is_unsettled, known_version
from harness.types import VersionSpan


class ServedLabel:
    """The label of one worker's weights, as far as it is known.

    Args:
        label: The one to assume before the worker has said anything.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._heard = {label}
        self._moment = 0
        """Counts questions and answers, in the order of this process."""
        self._known_since = 0
        self._changed_at = 0
        self._confirmed_at = 0
        """Moment of the last question that was answered with `label`."""

    @property
    def is_unsettled(self) -> bool:
        """Its weights are half-way through an update, or an update of them has failed."""
        return is_unsettled(self.label)

    def asking(self) -> int:
        """The moment of a question; goes with its answer to `learn`."""
        self._moment += 1
        return self._moment

    def learn(self, label: str, asked: int) -> None:
        """The worker named `label` in answer to a question of the moment `asked`."""
        mine, found = known_version(self.label), known_version(label)
        is_later = label not in self._heard if mine is None or found is None else found > mine
        if asked > self._known_since or is_later:
            self.set(label)
        if label == self.label:
            self._confirmed_at = max(self._confirmed_at, asked)

    def is_confirmed(self, label: str, since: int, until: int) -> bool:
        """The worker served `label` from the moment `since` to the moment `until`, and nothing else between the two.

        No look is made at every moment: weights that were there before never come back under their label (I6).
        """
        is_same = self.label == label and not self.is_unsettled
        return is_same and self._changed_at <= since and until < self._confirmed_at

    def set(self, label: str) -> None:
        """It is known otherwise what the worker serves from now on."""
        self._moment += 1
        if label != self.label:
            self._changed_at = self._moment
        self.label, self._known_since = label, self._moment
        self._heard.add(label)


class Unlabeled:
    """The tokens of a stream that names its weights at its end only, and how many of them are known to be whose.

    Those that had arrived before a question whose answer was the `label` of before the request are of that label.
    """

    def __init__(self, served: ServedLabel, label: str, begun: int) -> None:
        self._served = served
        self._label = label
        self._begun = begun
        self._count = 0
        self._arrivals: list[tuple[int, int]] = []
        """Moments, and the tokens that had arrived by then; only those that are not confirmed yet."""
        self._confirmed = 0

    def note(self, tokens: int) -> None:
        """So many further ones have arrived."""
        self._count += tokens
        self._arrivals.append((self._served.asking(), self._count))

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Of those that are known."""
        while self._arrivals and self._served.is_confirmed(self._label, self._begun, self._arrivals[0][0]):
            self._confirmed = self._arrivals.pop(0)[1]
        return (VersionSpan(self._label, 0, self._confirmed),) if self._confirmed else ()
