"""Tokens that wait for their next policy version (I7); uses the session core. Start with `scoring.py`."""
