"""Concurrent requests to all shards, each with its own deadline."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Generic, NamedTuple, TypeVar

from harness.errors import HarnessError, ShardUnavailable
from harness.gateway.shards.placement import choose_shard
from harness.gateway.shards.shard_client import ShardClient
from harness.machine.deadlines import not_in_time
from harness.sessions.shard_ids import ShardPlace, find_shard

_T = TypeVar("_T")


class ShardAnswers(NamedTuple, Generic[_T]):
    answers: dict[int, _T]
    problems: tuple[str, ...]
    """A line for each shard that failed."""

    @property
    def some(self) -> list[_T]:
        """Nonempty results. Raises `ShardUnavailable` if every shard failed."""
        if not self.answers:
            raise ShardUnavailable(f"all shards failed: {'; '.join(self.problems)}")
        return list(self.answers.values())


class ShardClients:
    def __init__(self, links: Sequence[ShardClient]) -> None:
        self._links = links

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[ShardClient]:
        return iter(self._links)

    def place_of(self, number: int) -> ShardPlace:
        return ShardPlace(number, len(self))

    def find(self, digits: str) -> ShardClient:
        """Return the shard of a session id, or of a key without its prefix."""
        return self._links[find_shard(digits, len(self))]

    def choose(self, only: int | None) -> ShardClient | None:
        """Return the shard for a new session, which is `only` if given, or None if none serves."""
        loads = {link.number: link.load for link in self._links if only in (None, link.number)}
        number = choose_shard({number: load for number, load in loads.items() if load is not None})
        return None if number is None else self._links[number]

    async def fetch(
        self, kind: type[_T], seconds: float, path: str, body: bytes | None = None, *, also: int = HTTPStatus.OK
    ) -> ShardAnswers[_T]:
        """GET `path` from each shard, or POST `body` there; for `kind` and `also` see `ShardAnswer.read`."""

        async def ask(link: ShardClient) -> _T:
            return (await link.ask("GET" if body is None else "POST", path, body)).read(kind, also)

        return await self.ask(ask, seconds)

    async def ask(self, call: Callable[[ShardClient], Awaitable[_T]], seconds: float) -> ShardAnswers[_T]:
        """Call `call` for each link, for at most `seconds`."""

        async def ask(link: ShardClient) -> _T | str:
            try:
                async with asyncio.timeout(seconds):
                    return await call(link)
            except TimeoutError:
                return not_in_time(seconds)
            except HarnessError as error:
                return error.message

        found = await asyncio.gather(*map(ask, self._links))
        said = dict(zip((link.number for link in self._links), found, strict=True))
        problems = tuple(
            answer if answer.startswith(f"shard {number}") else f"shard {number}: {answer}"
            for number, answer in said.items()
            if isinstance(answer, str)
        )
        return ShardAnswers(
            {number: answer for number, answer in said.items() if not isinstance(answer, str)}, problems
        )
