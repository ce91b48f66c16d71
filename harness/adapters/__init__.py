"""Plug-ins for trainers (AReaL, miles, slime, verl, Ray), below command line and viewer. Start with `episodes.py`."""
