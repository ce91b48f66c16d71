# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==2.54.0"]
# ///
"""The loop that the environment names, with the openai SDK 2."""

import os
from importlib import import_module

if __name__ == "__main__":
    import_module(os.environ["LOOP"]).main()
