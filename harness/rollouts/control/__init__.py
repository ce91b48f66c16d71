"""Control of engines and session servers together: abort, pause, weight updates.

May use the clients, the engines and everything below. Start with `abort.py` or `weights.py`.
"""
