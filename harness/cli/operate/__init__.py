"""Commands that operate a running server. They use the client. Start with `ctl.py`."""
