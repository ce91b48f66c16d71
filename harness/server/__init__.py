"""The session server: agents' model calls, owners' sessions, and the gate.

Uses `engines`, `store`, `telemetry` and the layers below. Start with `turns`, then `serving`.
"""
