"""Harbor (interface of harbor 0.26) over a session server: `SessionAgent` for the `import_path` of a job's agent.

See docs/tasks.md.
"""

from typing import Any

__all__ = ["SessionAgent"]


def __getattr__(name: str) -> Any:
    """Return `SessionAgent`, importing Harbor, which has its base."""
    if name != "SessionAgent":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harness.adapters.harbor.session_agent import SessionAgent

    return SessionAgent
