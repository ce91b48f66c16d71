"""What a test costs that takes its process down, or does not end: itself, and no other.

pytest-xdist 3.8 gives the group of a test that killed its worker to the next one, with the test: that dies as well,
until all restarts are used up and the run ends in an internal error, or a worker waits for tests that nobody gives it.
Here the test counts as done. pytest-timeout rings once, and what it raises ends nothing where a task of the event loop
happens to run, whose result nobody awaits: here it rings until the test has ended.
"""

import signal
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

_RINGS_AGAIN_S = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the modules that have the longest time limits: at the end, one worker runs while the others wait."""
    limits: dict[Path, float] = {}
    for item in items:
        for mark in item.iter_markers("timeout"):
            limits[item.path] = max(limits.get(item.path, 0), *mark.args)
    items.sort(key=lambda item: -limits.get(item.path, 0))


class Scheduling(LoadGroupScheduling):
    """Groups as `--dist loadgroup` has them."""

    def remove_node(self, node: WorkerController) -> str | None:
        """The test by which `node` died, None where none ran; the rest of its tests wait for another worker."""
        units = self.assigned_work.pop(node)
        left = [name for unit in units.values() for name, is_done in unit.items() if not is_done]
        if not left:
            return None
        for scope, unit in units.items():
            if rest := {name: False for name, is_done in unit.items() if not is_done and name != left[0]}:
                self.workqueue[scope] = rest
        for other in self.nodes:
            self._reschedule(other)
        return left[0]

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Forget a unit that is done: all of those a worker has had would be counted after each of its tests."""
        scope = self._split_scope(self.registered_collections[node][item_index])
        super().mark_test_complete(node, item_index, duration)
        if all(self.assigned_work[node][scope].values()):
            del self.assigned_work[node][scope]

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:  # it replaces another, and has yet to say which tests it has
            return
        with suppress(OSError):  # it has died just now; what it was given is taken back by `remove_node`
            super()._reschedule(node)
            # A worker runs a test once it knows the one after it: with a single one it waits for ever.
            while self.workqueue and self._pending_of(self.assigned_work[node]) < 2 and not node.shutting_down:
                self._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """See `Scheduling`."""
    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, Any, Any]:
    """The alarm that has been set rings until it is taken back."""
    done = yield
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, min(settings.timeout, _RINGS_AGAIN_S))
    return done
