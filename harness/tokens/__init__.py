"""Messages to token ids and back, for each model family. No I/O. Uses `types` and `errors` only. Start with
`chat_tokenizer.py`.
"""
