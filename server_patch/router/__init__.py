"""One URL for an SGLang gateway and its workers. Start with `app.py`: `passthrough.py`, or `fan_out.py` for verbs."""
