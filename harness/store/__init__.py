"""Durable storage of sessions: the `SessionStore` contract and its implementations in SQLite and in memory.

Uses `sessions` and the layers below it; knows no server. Start with `base`.
"""
