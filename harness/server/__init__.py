"""The session server: agents' model calls, owners' sessions, and the operator's gate.

Uses `sessions`, `dialects`, `tokens`, `engines`, `store` and `telemetry`. Start with `turns`, then `serving`.
"""
