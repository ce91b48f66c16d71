"""HTTP of the session server: clients, permissions, bodies and responses.

Knows requests, not routes or turns. Start with `connection`.
"""
