"""Client of a session server, without the server's code. Start with `session_server.py`."""
