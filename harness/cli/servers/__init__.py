"""Commands that serve sessions until Ctrl+C: serve and router. Start with `serve.py`."""
