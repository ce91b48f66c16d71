"""The page of a run or server: markup, style, script, and the data that the script reads.

Uses the viewer's views. Start with `run_page.py`.
"""
