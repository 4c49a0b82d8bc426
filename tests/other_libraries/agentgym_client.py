"""Plays one episode with a client of AgentGym's own package; run by its Python.

python agentgym_client.py ADDRESS ITEM ACTION …    prints what each client saw, as JSON
"""

import json
import sys

from agentenv.envs import BabyAIEnvClient, SciworldEnvClient

FORMS = {BabyAIEnvClient: "Action: {}", SciworldEnvClient: "Thought:\ngo on\n\nAction:\n{}"}


def played(kind, form: str, address: str, item: int, actions: list[str]) -> dict:
    client = kind(address, item + 1)
    client.reset(item)
    first = client.observe() if kind is SciworldEnvClient else client.info["observation"]
    steps = [client.step(form.format(action)) for action in actions]
    seen = [[step.state, step.reward, step.done] for step in steps]
    return {"first": first, "steps": seen, "closed": client.close()}


if __name__ == "__main__":
    address, item, *actions = sys.argv[1:]
    found = {
        kind.__name__: played(kind, form, address, int(item), actions)
        for kind, form in FORMS.items()
    }
    print(json.dumps(found))
