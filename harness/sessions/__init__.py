"""Session core without I/O; uses `samples`, `tokens`, `types` and below. Start with `session.py`."""
