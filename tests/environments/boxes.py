"""An environment of tools, and calls as Qwen and Hermes write them."""

import asyncio
import json
from typing import Annotated, Literal

from msgspec import Meta

from mage_async.environments.tools import tool
from mage_async.trajectory import Task

TASK = Task("boxes", "0", 5)


class Boxes:
    """Find the key. It lies in one of the boxes."""

    is_done = False

    def reset(self, seed: int, task: int) -> str:
        self.found, self.said = 0.0, ""
        return "There are three boxes."

    @tool
    def look(self, box: int, closely: bool = False) -> str:
        """Look into a box.

        Args:
            box: the number of the box.
        """
        self.found += box == 2
        self.is_done = self.found == 2
        return f"box {box}: {'a key' if box == 2 else 'nothing'}"

    @tool
    def move(self, to: Literal["left", "right"], steps: Annotated[int, Meta(ge=1)]) -> dict:
        """Move a box."""
        return {"to": to, "steps": steps}

    @tool
    def fall(self) -> str:
        """Fall."""
        raise KeyError("floor")

    def answer(self, text: str) -> str:
        self.said = text
        return f"You said {text}."

    def score(self) -> float:
        return self.found + 10 * (self.said == "box 2")


class Waiting(Boxes):
    """The same, over a network."""

    @tool
    async def look(self, box: int) -> str:
        """Look into a box."""
        await asyncio.sleep(0)
        return super().look(box)

    async def score(self) -> float:
        return super().score()


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
