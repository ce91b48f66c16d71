"""AReaL (interface of areal 1.0.4) over a session server.

    trainer.train(
        workflow="harness.adapters.areal.SessionWorkflow",
        workflow_kwargs={"session_server": URL, "agent": "sure_agent.run", "gconfig": config.gconfig},
    )

Programs that outlive AReaL call `close`. See docs/embedding.md.
"""

from typing import Any

from harness.adapters.episodes import close_episodes as close

__all__ = ["SessionWorkflow", "close"]


def __getattr__(name: str) -> Any:
    """Return `SessionWorkflow`, importing AReaL to register it."""
    if name != "SessionWorkflow":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harness.adapters.areal.workflow import register_workflow

    return register_workflow()
