"""Agents as programs and functions. Start with `task.py`, the input, then `agent_runner.py`."""
