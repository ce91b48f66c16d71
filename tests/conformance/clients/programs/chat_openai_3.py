# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.52.0"]
# ///
"""Chat completions with the stream helper of the openai SDK 3."""

from chat_loop import main

if __name__ == "__main__":
    main()
