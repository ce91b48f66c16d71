"""The repeat guard: ends a generation that repeats itself, in its engine. Start with `detector.py`."""

from server_patch.repeat_terminate.config import OBJECT_KEY_TEXT, ConfigError, RepeatTerminateConfig
from server_patch.repeat_terminate.detector import RepeatDetector, Rule

__all__ = ["OBJECT_KEY_TEXT", "ConfigError", "RepeatDetector", "RepeatTerminateConfig", "Rule"]
