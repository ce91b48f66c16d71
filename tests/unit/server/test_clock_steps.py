"""The clock of a machine is set while a server lives: leases and idle times last as long as they say."""

import time
from pathlib import Path

import pytest

from harness.machine.clock import steady, steady_time
from harness.server.admitted import AdmittedTurns
from harness.server.gatekeeper import Gatekeeper
from harness.server.registry import SessionRegistry
from harness.server.store.base import MemoryStore, SessionStore
from harness.server.store.sqlite import SQLiteStore
from harness.server.telemetry.metrics import ServerMetrics
from harness.sessions.gate import GateState, HoldKind, HoldRequest, RenewRequest
from harness.sessions.session_config import SessionConfig
from tests.session_servers.served import SetClock

DAYS, HOUR = 2 * 86_400.0, 3_600.0
STEPS = pytest.mark.parametrize("step_s", [DAYS, -HOUR])


def gatekeeper_of(store: SessionStore, clock: SetClock, lease_clock: SetClock) -> Gatekeeper:
    """A gatekeeper by these clocks."""
    return Gatekeeper(store, ServerMetrics(), pause_timeout_s=1.0, clock=clock, lease_clock=lease_clock)


@STEPS
async def test_a_lease_lasts_as_long_as_it_says(step_s: float, tmp_path: Path):
    """Placed and renewed; a server that comes after finds what is left of it."""
    clock, counted, started = SetClock(), SetClock(), SetClock()
    async with SQLiteStore(tmp_path / "s.db") as store:
        gatekeeper = gatekeeper_of(store, clock, counted)
        gatekeeper.place(HoldRequest("trainer", 60.0), HoldKind.PAUSE)
        clock.now += step_s
        counted.now += 59.0
        await gatekeeper.expire()
        assert gatekeeper.gate.state is GateState.PAUSED

        await gatekeeper.keep(gatekeeper.renew(RenewRequest("trainer", 60.0)))
        started.now = clock.now
        later = gatekeeper_of(store, clock, started)
        await later.restore()
        for each, seen in ((gatekeeper, counted), (later, started)):
            seen.now += 59.0
            await each.expire()
            assert each.gate.state is GateState.PAUSED
            seen.now += 2.0
            await each.expire()
            assert each.gate.state is GateState.OPEN


@STEPS
async def test_a_session_is_idle_when_the_time_has_passed(step_s: float):
    """And not when somebody has set the clock."""
    store, metrics, clock, counted = MemoryStore(), ServerMetrics(), SetClock(), SetClock()
    turns = AdmittedTurns(store, metrics)
    registry = SessionRegistry(store, metrics, turns, clock, drain_grace_s=1.0, idle_ttl_s=HOUR, idle_clock=counted)
    await registry.open(SessionConfig())
    clock.now += step_s
    counted.now += HOUR - 1
    assert await registry.expire() == 0

    counted.now += 2

    assert await registry.expire() == 1


def test_a_server_counts_for_itself_unless_it_is_handed_a_clock():
    """Tests hand one in, in which hours pass at once."""
    by_hand = SetClock()
    gatekeeper = Gatekeeper(MemoryStore(), ServerMetrics(), pause_timeout_s=1.0)

    assert gatekeeper.clock is time.time
    assert gatekeeper.lease_clock is steady_time
    assert steady(by_hand) is by_hand
    assert steady(time.time) is steady_time
