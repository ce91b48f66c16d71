"""The session server: agents' model calls, owners' sessions, and the gate.

Uses `engines`, `sessions` and the layers below; `store/` keeps sessions, `telemetry/` reports on them. Start with
`turns.py`, then `serving.py`.
"""
