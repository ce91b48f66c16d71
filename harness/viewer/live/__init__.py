"""The live page of a working server: the changes since the last look, for any number of browsers.

Uses `harness.rollouts.client` and the viewer's page. Start with `live_page.py`.
"""
