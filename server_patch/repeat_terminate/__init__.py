"""The repeat guard: ends a generation that has fallen into repetition, inside the engine that runs it.

Only the standard library is imported from here; what attaches it to an engine lies in modules of its own.
"""

from server_patch.repeat_terminate.config import (
    OBJECT_KEY_TEXT,
    ConfigError,
    RepeatTerminateConfig,
)
from server_patch.repeat_terminate.detector import RepeatDetector, Rule

__all__ = ["OBJECT_KEY_TEXT", "ConfigError", "RepeatDetector", "RepeatTerminateConfig", "Rule"]
