"""Faults of scenarios: when they are due, and how they break agents, network, engine and server.

May use judge, record and scenarios. Start with `injector.py`.
"""
