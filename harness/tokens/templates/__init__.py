"""Chat tokenizers from Jinja templates and from the `renderers` package. Start with `chat_template.py`."""
