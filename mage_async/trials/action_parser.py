"""Parse completions: the action or the remark is the text between its tags.

Only text outside thinking counts: a tag quoted inside `<think>` is no action. `trial_run.py`
decides what happens to a completion without an action.
"""

import re
from dataclasses import dataclass
from typing import Literal

from mage_async.trajectory import Kind

Forced = Literal["none", "open", "both"]
"""Tags of actions that the transcript writes in place of the policy: none, the opening one, or
both."""

NAMES = {kind: "action" if kind is Kind.ACT else "remark" for kind in Kind}
"""Name of the tag of each kind of turn."""
MAX_REMARK_CHARACTERS = 2000
"""Largest number of characters of a remark; a longer remark is cut."""


@dataclass(frozen=True, slots=True)
class ActionParser:
    """Find the action or remark in a completion, and say which tags the transcript writes.

    If the transcript writes opening tags, it also adds the closing tag of a remark that lacks one.
    """

    forced: Forced
    has_tools: bool = False
    """Whether an action is the whole completion, in which the environment reads tool calls."""

    def prefill(self, kind: Kind) -> str:
        """Return the text with which the assistant's turn begins."""
        return "" if self.forced == "none" or self.is_whole_completion(kind) else f"<{NAMES[kind]}>"

    def closing(self, kind: Kind, completion: str) -> str:
        """Return the text that the transcript adds after a completion that does not close its tag.

        This is the closing tag, or its rest if the completion ends with a beginning of it, which
        happens when `max_action_tokens` cuts it off.
        """
        if self.is_whole_completion(kind):
            return ""
        closing_tag = f"</{NAMES[kind]}>"
        is_forced = self.forced == "both" or (kind is not Kind.ACT and self.forced == "open")
        if not is_forced or closing_tag in completion:
            return ""
        # A tag has no "<" after its first character, so the last "<" of a completion that was cut
        # within a tag begins that tag.
        return closing_tag.removeprefix(completion[completion.rfind("<") :])

    def parse(self, kind: Kind, completion: str) -> str | None:
        """Return the stripped text between the tags; `None` if there is none."""
        if self.is_whole_completion(kind):
            return outside_thinking(completion).strip()
        name = NAMES[kind]
        text = self.prefill(kind) + completion + self.closing(kind, completion)
        found = re.search(rf"<{name}>(.*?)</{name}>", outside_thinking(text), re.DOTALL)
        if found is None:
            return None
        inside = found[1].strip()
        return inside if kind is Kind.ACT else inside[:MAX_REMARK_CHARACTERS]

    def is_whole_completion(self, kind: Kind) -> bool:
        """Return whether a turn of this kind is a whole completion, without tags."""
        return self.has_tools and kind is Kind.ACT


def outside_thinking(text: str) -> str:
    """Return the text without its thinking; thinking that never ends hides everything after it."""
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    # Some chat templates write the opening tag, so that a completion has the closing one alone.
    return text.rpartition("</think>")[2].split("<think>")[0]
