"""One URL in front of an SGLang gateway and its workers.

Start with `app.py`: requests pass (`passthrough.py`), control verbs reach every worker (`fan_out.py`).
"""
