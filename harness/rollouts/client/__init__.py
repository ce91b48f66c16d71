"""Client of a session server. May use `sessions` and below, never the server itself.

Start with `session_server.py`.
"""
