"""A way to one session for a sandbox without a network.

`outside.open_relay` listens on a unix socket that the sandbox gets; `inside.py` is the client in it. Start with `link`.
"""
