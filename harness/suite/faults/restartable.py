"""Something that runs, can be killed, and started again; what it holds is given back however it ended."""

from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self


class Restartable(ABC):
    """A context manager: entering starts it, leaving ends it."""

    def __init__(self) -> None:
        self._holds = AsyncExitStack()
        """What there is while it runs."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._holds.aclose()

    @abstractmethod
    async def start(self) -> None:
        """Run, after `kill` at the same address."""

    @abstractmethod
    async def kill(self) -> None:
        """Be gone, without a word to anybody. Idempotent."""

    async def _give_back(self) -> None:
        """What the operating system would take from something that died."""
        holds, self._holds = self._holds, AsyncExitStack()
        await holds.aclose()
