"""The multi-turn agent session harness: agents as processes in, token-exact training samples out."""

__version__ = "0.1.0"
