"""Weight label of one worker, learned from answers that may arrive out of order.

An answer asked for after the present label was learned always wins: a restarted worker returns to its first label. An
older answer can only advance the label.
"""

from harness.samples.versions import is_unsettled, known_version
from harness.types import VersionSpan


class ServedLabel:
    """Present label of one worker's weights, initially `label`."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._heard = {label}
        self._moment = 0
        self._known_since = 0
        self._changed_at = 0
        self._confirmed_at = 0
        """Last question answered with `label`."""

    @property
    def is_unsettled(self) -> bool:
        """True while a weight update is under way or after one failed."""
        return is_unsettled(self.label)

    def asking(self) -> int:
        """Return the moment of a question, for `learn`."""
        self._moment += 1
        return self._moment

    def learn(self, label: str, asked: int) -> None:
        """Take in the answer to a question of moment `asked`."""
        mine, found = known_version(self.label), known_version(label)
        is_later = label not in self._heard if mine is None or found is None else found > mine
        if asked > self._known_since or is_later:
            self.set(label)
        if label == self.label:
            self._confirmed_at = max(self._confirmed_at, asked)

    def is_confirmed(self, label: str, since: int, until: int) -> bool:
        """Return True if the worker served only `label` from moment `since` to `until`."""
        # Two equal reads suffice: replaced weights never return under their old label (I6).
        is_same = self.label == label and not self.is_unsettled
        return is_same and self._changed_at <= since and until < self._confirmed_at

    def set(self, label: str) -> None:
        """Set a label known from elsewhere."""
        self._moment += 1
        if label != self.label:
            self._changed_at = self._moment
        self.label, self._known_since = label, self._moment
        self._heard.add(label)


class Unlabeled:
    """Tokens of a stream without versions. They get the `label` from before if a later read confirms it."""

    def __init__(self, served: ServedLabel, label: str, begun: int) -> None:
        self._served = served
        self._label = label
        self._begun = begun
        self._count = 0
        self._arrivals: list[tuple[int, int]] = []
        """Unconfirmed moments, and token counts by then."""
        self._confirmed = 0

    def note(self, tokens: int) -> None:
        self._count += tokens
        self._arrivals.append((self._served.asking(), self._count))

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Span of the tokens whose version is known."""
        while self._arrivals and self._served.is_confirmed(self._label, self._begun, self._arrivals[0][0]):
            self._confirmed = self._arrivals.pop(0)[1]
        return (VersionSpan(self._label, 0, self._confirmed),) if self._confirmed else ()
