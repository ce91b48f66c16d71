"""A session server and an SGLang router at one URL, with `server_patch.router`. Start with `routed.py`."""
