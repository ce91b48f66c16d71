"""The thread that owns an engine.

Other threads post calls, which it carries out in order between two steps. When the thread ends, for whatever reason,
every live request and every posted call is answered: nothing waits for ever.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from harness.errors import EngineError, EngineUnavailable, HarnessError

if TYPE_CHECKING:  # it imports torch
    from harness.engines.huggingface.engine import LocalEngine

T = TypeVar("T")


class _EngineCall:
    """A function to be called with the engine, and where its result goes."""

    def __init__(self, function: Callable[["LocalEngine"], Any]) -> None:
        self._function = function
        self.future: Future[Any] = Future()

    def run(self, engine: "LocalEngine") -> None:
        """Answer the call; an error that is not an `EngineError` is raised and leaves it unanswered."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function(engine))
        except EngineError as error:
            self.future.set_exception(error)

    def refuse(self, error: EngineError) -> None:
        """Answer a call that did not come to its end."""
        if self.future.running() or self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EngineThread:
    """Runs an engine that is built, used and dropped on one thread."""

    def __init__(self, build: Callable[[], "LocalEngine"]) -> None:
        self._build = build
        self._calls: queue.SimpleQueue[_EngineCall] = queue.SimpleQueue()
        self._posting = threading.Lock()  # once the thread has ended, nothing is posted that nobody would answer
        self._has_ended = False
        self._is_stopping = False
        self._failure: Exception | None = None
        self.ready: Future[None] = Future()
        """Done when the engine is built, or cannot be."""
        self.engine: LocalEngine | None = None
        """Only to be looked at from other threads; None before and after its life."""
        self._thread = threading.Thread(target=self._run, name="harness-engine", daemon=True)

    @property
    def failure(self) -> str:
        """Why the thread ended by itself; empty when it did not."""
        return "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"

    def explain_end(self) -> EngineError:
        """The error for a call that comes too late."""
        if self._failure is None:
            return EngineUnavailable("the local engine is not running; use it inside `async with`")
        return EngineError(f"the local engine has stopped: {self.failure}")

    def start(self) -> None:
        """Begin to build the engine, in the thread."""
        self._thread.start()

    def call(self, function: Callable[["LocalEngine"], T]) -> Future[T]:
        """Have `function` called with the engine between two steps; `EngineError` when the thread has ended."""
        call = _EngineCall(function)
        with self._posting:
            if not self._has_ended:
                self._calls.put(call)
                return call.future
        call.refuse(self.explain_end())
        return call.future

    def request_stop(self) -> None:
        """End live generations with their partial output, then the thread; one that is still loading ends after it."""

        def stop(engine: "LocalEngine") -> None:
            self._is_stopping = True
            engine.abort(None)

        self.call(stop)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; False when it does not come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self.engine = self._build()
            self.ready.set_result(None)
            while not self._is_stopping:
                if not engine.has_work:
                    self._answer(self._calls.get(), engine)  # there is nothing to do but to wait for a call
                while not self._calls.empty():
                    self._answer(self._calls.get(), engine)
                if engine.has_work:
                    engine.step()
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._failure = error
        finally:
            self._end()

    def _answer(self, call: _EngineCall, engine: "LocalEngine") -> None:
        try:
            call.run(engine)
        except BaseException:
            self._calls.put(call)  # it is answered with the others when the thread has ended
            raise

    def _end(self) -> None:
        with self._posting:
            self._has_ended = True
        error = self.explain_end()
        engine, self.engine = self.engine, None
        if engine is None:
            self.ready.set_exception(self._failure if isinstance(self._failure, HarnessError) else error)
        else:
            engine.fail_all(error)
        while not self._calls.empty():
            self._calls.get().refuse(error)
