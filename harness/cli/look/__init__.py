"""Commands that look at recorded runs and sessions. They use the viewer. Start with `show.py`."""
