"""OpenTelemetry spans of sessions. Start with `tracer.py`, which offers them to `sender.py`."""
