"""Agents as programs and functions: profiles, installation, processes, results.

Uses `harness.client` for session addresses. Start with `task.py`, the input, then `agent_runner.py`.
"""
