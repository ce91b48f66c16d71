"""Commands that check and complete an installation. Start with `doctor.py`."""
