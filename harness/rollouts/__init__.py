"""Rollouts: agents run against session servers, as trainers start, abort, pause and update them.

Rooms, lowest first: `client/` of a session server, `control/` of engines and servers, `agents/`. Start with
`manager.py`.
"""
