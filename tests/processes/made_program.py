"""A program that the model might write: it calls the model itself, with all that it knows of its agent's client."""

from calling_client import CallingClient

CallingClient().ask([{"role": "user", "content": "Say what is easily rewarded."}])
