"""Log, metrics and spans. May use `sessions` and below. Start with `metrics.py`."""
