"""Tasks in Harbor's format: read, listed as rows, built and verified. May use data and sandboxes.

Start with `harbor_task.py`.
"""
