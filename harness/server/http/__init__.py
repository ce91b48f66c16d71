"""HTTP of the session server: clients, permissions, bodies and responses.

Uses `dialects` and `sessions`. Start with `connection`.
"""
