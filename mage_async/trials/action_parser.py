"""Where in a completion the action or the remark stands: between its tags.

Only text outside thinking counts: a tag quoted inside `<think>` is no action.
"""

import re
from dataclasses import dataclass
from typing import Literal

from mage_async.trajectory import Kind

Forced = Literal["none", "open", "both"]

NAMES = {Kind.ACT: "action", Kind.REFLECT: "remark", Kind.STRATEGY: "remark"}
MAX_REMARK_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class ActionParser:
    """Which tags the transcript writes itself; remarks always close their own tag."""

    forced: Forced
    has_tools: bool = False
    """An action is all that was said: the environment reads calls of tools in it."""

    def prefill(self, kind: Kind) -> str:
        """Text with which the assistant's turn begins."""
        return "" if self.forced == "none" or self._is_whole(kind) else f"<{NAMES[kind]}>"

    def closing(self, kind: Kind, completion: str) -> str:
        """Text the transcript adds after a completion that does not close its tag: the tag, or its
        rest where the completion ends with a beginning of it, as one cut off by `max_action_tokens`
        may.
        """
        if self._is_whole(kind):
            return ""
        wanted = f"</{NAMES[kind]}>"
        is_forced = self.forced == "both" or (kind is not Kind.ACT and self.forced == "open")
        if not is_forced or wanted in completion:
            return ""
        begun = next(n for n in range(len(wanted) - 1, -1, -1) if completion.endswith(wanted[:n]))
        return wanted[begun:]

    def parse(self, kind: Kind, completion: str) -> str | None:
        """What stands between the tags, stripped; None where there is no such thing."""
        if self._is_whole(kind):
            return outside_thinking(completion).strip()
        name = NAMES[kind]
        text = self.prefill(kind) + completion + self.closing(kind, completion)
        found = re.search(rf"<{name}>(.*?)</{name}>", outside_thinking(text), re.DOTALL)
        if found is None:
            return None
        inside = found[1].strip()
        return inside if kind is Kind.ACT else inside[:MAX_REMARK_CHARACTERS]

    def _is_whole(self, kind: Kind) -> bool:
        return self.has_tools and kind is Kind.ACT


def outside_thinking(text: str) -> str:
    """The text without its thinking; thinking that never ends hides all that follows."""
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    return text.split("<think>")[0]
