"""Plug-ins for trainers: AReaL, miles, slime, verl and Ray.

May use everything but the command line, the viewer and the suite. Start with `episodes.py`.
"""
