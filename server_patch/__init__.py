"""Code that runs inside or in front of somebody else's server, attached when it starts; no sources are edited.

Nothing here imports `harness`: it lives in other people's processes, in environments where only the standard library
and the engine itself can be relied on (`router` and `background` belong to processes of ours, which have the base
install).
"""
