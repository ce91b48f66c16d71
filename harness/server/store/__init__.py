"""Durable storage of sessions: `SessionStore`, in SQLite and in memory.

Uses `sessions` and the layers below. Start with `base`.
"""
