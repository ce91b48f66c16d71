"""The label of the weights that one worker serves, learned from every answer that names it.

Answers arrive in another order than they were given: a request that began before an update ends after it, and of two
looks the earlier one may come in last. So each answer is weighed against what was known when it was asked for. An
answer that was asked for after the present label had been heard is newer than it, whatever it says: a worker that was
started again goes back to its first label. One that was asked for before can only move the label on, never back.
"""

from harness.samples.versions import is_unsettled, known_version


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

    def set(self, label: str) -> None:
        """It is known otherwise what the worker serves from now on."""
        self._moment += 1
        self.label, self._known_since = label, self._moment
        self._heard.add(label)
