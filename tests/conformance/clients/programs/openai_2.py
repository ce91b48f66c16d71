# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==2.54.0"]
# ///
"""The conversation with the openai SDK 2."""

from openai_loop import main

if __name__ == "__main__":
    main()
