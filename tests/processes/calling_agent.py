"""An agent with a shell that does what the model says: python calling_agent.py [reconnect] [fork] [spawn] [hand_over]

`reconnect` has a connection for each call. At the end, `fork` and `spawn` have a child make a call on a connection of
its own, as a subagent in a process would, and `hand_over` has a fork make one on the agent's, which ends meanwhile.
"""

import json
import multiprocessing
import os
import subprocess
import sys

from calling_client import CallingClient


def main() -> None:
    """Play one tool loop."""
    client, messages = CallingClient(), [{"role": "user", "content": "Do it."}]
    while calls := client.ask(messages).get("tool_calls"):
        if "reconnect" in sys.argv:
            client.close()
        for call in calls:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, check=False)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
    for method in {"fork", "spawn"}.intersection(sys.argv):
        child = multiprocessing.get_context(method).Process(target=ask_alone)
        child.start()
        child.join()
    if "hand_over" in sys.argv and not os.fork():
        client.ask([{"role": "user", "content": "On the same connection."}])


def ask_alone() -> None:
    """One call on a connection of its own."""
    CallingClient().ask([{"role": "user", "content": "A part of it."}])


if __name__ == "__main__":
    main()
