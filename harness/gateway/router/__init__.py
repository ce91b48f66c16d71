"""A session server and an SGLang router at one URL.

May use the server, the clients and `server_patch.router`. Start with `routed.py`.
"""
