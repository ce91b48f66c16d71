# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.52.0"]
# ///
"""The conversation with the openai SDK 3."""

from openai_loop import main

if __name__ == "__main__":
    main()
