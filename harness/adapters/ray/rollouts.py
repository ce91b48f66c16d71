"""Controller of a Ray cluster: an actor on every node, and rollouts spread over them.

Detached actors and their rollouts outlive their controller, and the next one of its name finds them. A lost node gets
no more rollouts. Samples stay on their node until fetched.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self
from uuid import uuid4

from harness.adapters.ray.node import LostLife, NodeSetup, RolloutNode
from harness.errors import AdapterError, Cause
from harness.machine.log import get_logger
from harness.rollouts.agents.task import AgentTask
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.control.abort_report import AgentHooks
from harness.rollouts.manager import ROLLOUT_RESUMED, rollout_without_session, without_session
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.server.telemetry.printable import shorten_secrets
from harness.types import Json

RAY_NODE_LOST = "ray_node_lost"
RAY_RESULT_LOST = "ray_result_lost"
STOP_S = 60.0
"""Time for a node to end before it is killed."""
ROLLOUTS_AT_ONCE = 10_000

_log = get_logger(__name__)


class NodeRollout(NamedTuple):
    """A rollout, and a reference to its samples."""

    rollout: Rollout
    """Without `samples`."""
    samples: Any
    """`ray.ObjectRef` of a tuple of `Sample`, or None."""


class _Node:
    def __init__(self, described: Any, actor: Any, setup: NodeSetup, *, is_ours: bool) -> None:
        self.node_id: str = described["NodeID"]
        self.setup = setup
        self.host: str = described["NodeManagerAddress"]
        self.actor = actor
        self.is_ours = is_ours  # else an earlier controller has left it
        self.address: SessionServerAddress | None = None
        self.running = 0
        self.is_lost = False


class RayRollouts:
    """Async context manager, entered after `ray.init`; its exit stops the nodes.

    Args:
        setup: Settings of every node.
        name: Name of the controller, which takes over actors of an earlier one. Only one may run.
        start_s: Seconds until every node must serve.
        cpus: CPUs that Ray reserves per node.

    Entering raises `AdapterError` naming a node that does not start, and undoes the others.
    """

    def __init__(self, setup: NodeSetup, *, name: str = "harness", start_s: float = 300.0, cpus: float = 1.0) -> None:
        self._setup = setup
        self._name = name
        self._start_s = start_s
        self._cpus = cpus
        self._nodes: list[_Node] = []

    async def __aenter__(self) -> Self:
        import ray

        nodes: list[_Node] = []
        try:
            for each in ray.nodes():
                if each["Alive"] and each["Resources"].get("CPU", 0) > 0:
                    nodes.append(self._find(each))  # noqa: PERF401  # what an error leaves of them has to be known
            if not nodes:
                raise AdapterError("expected nodes with CPUs to run on, found none in the cluster")
            started = await asyncio.gather(*(self._start(node) for node in nodes), return_exceptions=True)
            for failure in started:
                if failure is not None:
                    raise failure
        except BaseException:
            for node in nodes:
                if node.is_ours:
                    ray.kill(node.actor)
            raise
        self._nodes = nodes
        return self

    async def __aexit__(self, *_: object) -> None:
        import ray

        stopping = [asyncio.wait_for(_call(node.actor.stop), STOP_S) for node in self._alive()]
        try:
            await asyncio.gather(*stopping, return_exceptions=True)  # the actor is killed in any case
        finally:
            for node in self._nodes:
                ray.kill(node.actor)

    @property
    def session_servers(self) -> Sequence[SessionServerAddress]:
        return [node.address for node in self._alive() if node.address is not None]

    def abort_hooks(self) -> Sequence[AgentHooks]:
        """Return the hooks of each live node's agents."""
        abort = secrets.token_hex(8)  # a node may have several aborts at once
        return [
            AgentHooks(
                f"agents on node {node.node_id}",
                partial(node.actor.mark.remote, abort),
                partial(_call, node.actor.ask_agents),
                partial(_call, node.actor.stop_agents),
                partial(node.actor.clear.remote, abort),
            )
            for node in self._alive()
        ]

    async def run(self, task: AgentTask) -> NodeRollout:
        """Run `task` on the least loaded node, where its agent must exist. Raises `AdapterError` without nodes.

        If the node is lost, the rollout continues elsewhere, up to `resume_attempts` times: from its record if that
        node can read it (`NodeSetup.store`), else from the start.
        """
        started, life = time.monotonic(), task
        lost: tuple[LostLife, ...] = ()
        for left in range(task.resume_attempts, -1, -1):
            session: Json = {"session_id": uuid4().hex, **life.session}
            life = replace(life, session=session, resume_attempts=left)
            node = self._least_loaded()
            made = await self._run_on(node, life, lost)
            left_s = task.deadline_s - (time.monotonic() - started)
            if not left or left_s <= 0 or not (node.is_lost and made.samples is None and self._alive()):
                break
            _log.info(ROLLOUT_RESUMED, session_id=shorten_secrets(session["session_id"]), node=node.node_id)
            lost = (*lost, LostLife(Path(node.setup.store), session["session_id"]))
            life = replace(without_session(task), deadline_s=left_s)
        return made._replace(rollout=replace(made.rollout, seconds=time.monotonic() - started))

    async def _run_on(self, node: "_Node", task: AgentTask, lost: Sequence[LostLife]) -> NodeRollout:
        import ray
        from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError

        started = time.monotonic()
        node.running += 1
        try:
            ended, samples = node.actor.run.options(num_returns=2).remote(task, lost)
            return NodeRollout(await _await(ended), samples)
        except ObjectLostError as error:  # the node may still be alive; if not, the next rollout notices
            _log.warning(RAY_RESULT_LOST, node=node.node_id, error=_reason(error))
            detail = f"its result was lost on node {node.node_id}"
        except (RayActorError, NodeDiedError, WorkerCrashedError) as error:
            if not node.is_lost:
                node.is_lost = True
                ray.kill(
                    node.actor
                )  # an unreachable one must not continue serving behind gates that no controller turns
                _log.warning(RAY_NODE_LOST, node=node.node_id, running=node.running, error=_reason(error))
            detail = f"node {node.node_id} was lost, and the session with it"
        finally:
            node.running -= 1
        outcome = Outcome(OutcomeKind.HARNESS_FAILED, Cause.HARNESS, detail)
        return NodeRollout(rollout_without_session(task, outcome, time.monotonic() - started), None)

    def _least_loaded(self) -> "_Node":
        alive = self._alive()
        if not alive:
            raise AdapterError("every node of the cluster is lost")
        return min(alive, key=lambda each: each.running)

    def _alive(self) -> list[_Node]:
        return [node for node in self._nodes if not node.is_lost]

    def _find(self, described: Any) -> _Node:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node_id = described["NodeID"]
        name = f"{self._name}-{node_id}"
        setup = replace(self._setup, store=self._setup.store.replace("{node}", node_id))
        try:
            return _Node(described, ray.get_actor(name, self._name), setup, is_ours=False)
        except ValueError:  # there is none
            pass
        remote = ray.remote(RolloutNode).options(
            name=name,
            namespace=self._name,
            lifetime="detached",
            num_cpus=self._cpus,
            max_concurrency=ROLLOUTS_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        return _Node(described, remote.remote(setup), setup, is_ours=True)

    async def _start(self, node: _Node) -> None:
        try:
            async with asyncio.timeout(self._start_s):
                node.address = await _call(node.actor.start, node.setup, node.host)
        except TimeoutError as error:
            reason = f"nothing within {self._start_s:g} s; Ray reserves {self._cpus:g} CPUs for it"
            raise AdapterError(f"node {node.node_id} does not serve sessions: {reason}") from error
        except Exception as error:  # any failure of the node comes as an error of Ray's
            raise AdapterError(f"node {node.node_id} does not serve sessions: {_reason(error)}") from error


async def _await(reference: Any) -> Any:
    import ray

    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise


async def _call(method: Any, *given: object) -> Any:
    return await _await(method.remote(*given))


def _reason(error: BaseException) -> str:
    # Ray puts the error itself into the last line.
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
