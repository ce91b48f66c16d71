"""Learners: packs in, one weight update per step out.

May use `samples`, `types` and `errors`. Start with `learner.py`.
"""
