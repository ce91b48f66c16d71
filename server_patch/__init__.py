"""Code that runs inside or in front of a foreign server. Nothing here imports `harness`.

Inside an engine only the standard library and the engine are available; `router` and `background` run in processes of
ours. Start with `repeat_terminate` or `router`.
"""
