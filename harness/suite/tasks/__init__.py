"""Tasks in Harbor's format: read, listed as rows, built and verified. Start with `harbor_task.py`."""
