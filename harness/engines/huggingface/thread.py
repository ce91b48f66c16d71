"""The thread that owns an engine.

Other threads post calls, which it runs in order between two steps. However the thread ends, every live request and
every posted call gets an answer, so no caller waits forever.
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
    def __init__(self, function: Callable[["LocalEngine"], Any]) -> None:
        self._function = function
        self.future: Future[Any] = Future()

    def run(self, engine: "LocalEngine") -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function(engine))
        # Any other error ends the thread; `_end` then refuses this call.
        except EngineError as error:
            self.future.set_exception(error)

    def refuse(self, error: EngineError) -> None:
        if self.future.running() or self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EngineThread:
    """Builds, runs and drops an engine on one thread."""

    def __init__(self, build: Callable[[], "LocalEngine"]) -> None:
        self._build = build
        self._calls: queue.SimpleQueue[_EngineCall] = queue.SimpleQueue()
        self._posting = threading.Lock()  # after the thread has ended, no call may be posted
        self._has_ended = False
        self._is_stopping = False
        self._failure: Exception | None = None
        self.ready: Future[None] = Future()
        """Done when the engine is built or building failed."""
        self.engine: LocalEngine | None = None
        """Read-only for other threads; None before and after its life."""
        self._thread = threading.Thread(target=self._run, name="harness-engine", daemon=True)

    @property
    def failure(self) -> str:
        """Reason why the thread ended by itself; empty otherwise."""
        return "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"

    def explain_end(self) -> EngineError:
        """Return the error for a call that comes too late."""
        if self._failure is None:
            return EngineUnavailable("the local engine is not running; use it inside `async with`")
        return EngineError(f"the local engine has stopped: {self.failure}")

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[["LocalEngine"], T]) -> Future[T]:
        """Run `function` with the engine between two steps; the future fails with `EngineError` after the end."""
        call = _EngineCall(function)
        with self._posting:
            if not self._has_ended:
                self._calls.put(call)
                return call.future
        call.refuse(self.explain_end())
        return call.future

    def request_stop(self) -> None:
        """Abort live generations, then end the thread; during loading, right after it."""

        def stop(engine: "LocalEngine") -> None:
            self._is_stopping = True
            engine.abort(None)

        self.call(stop)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; return False if it does not end in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self.engine = self._build()
            self.ready.set_result(None)
            while not self._is_stopping:
                if not engine.has_work:
                    self._answer(self._calls.get(), engine)  # idle: block until a call comes
                while not self._calls.empty():
                    self._answer(self._calls.get(), engine)
                if engine.has_work:
                    engine.step()
        except Exception as error:  # noqa: BLE001 - waiting callers must get any error
            self._failure = error
        finally:
            self._end()

    def _answer(self, call: _EngineCall, engine: "LocalEngine") -> None:
        try:
            call.run(engine)
        except BaseException:
            self._calls.put(call)  # `_end` refuses it with the others
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
