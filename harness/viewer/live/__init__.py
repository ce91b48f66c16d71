"""The live page of a working server, for any number of browsers. Start with `live_page.py`."""
