"""Messages to token ids and back, for each model family. No I/O. Start with `chat_tokenizer.py`."""
