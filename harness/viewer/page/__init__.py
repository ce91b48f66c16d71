"""The page of a run or server: markup, style, script, and its data, from views. Start with `run_page.py`."""
