"""Agents as programs and functions: profiles, installation, processes, results.

Uses `harness.rollouts.client` for session addresses. Start with `task.py`, the input, then `agent_runner.py`.
"""
