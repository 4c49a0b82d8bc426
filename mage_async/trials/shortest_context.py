"""The shortest context of a trial: a lower bound on its length, known before there is a tokenizer.

Scripted trials are counted in a chat of whole words, with one token for each word, tag and role. No
tokenizer that we know joins words across a space, and every chat template writes at least the role;
so the prompts of any policy are as long or longer.
"""

import random
import re
from collections.abc import Sequence

from mage_async.environments.environment import Environment
from mage_async.trials.chat_format import ChatFormat, Message, Tools
from mage_async.trials.scripted import random_task, scripted_trial
from mage_async.trials.text_encoder import Tokens
from mage_async.trials.trial_rules import TrialRules

NUM_TRIALS = 3
"""Scripted trials that are measured: they differ in length, and a longer one costs one group."""
_MARKS = re.compile(r"(<\|user\|>|<\|assistant\|>|</?action>|</?remark>)")


def shortest_context(environment: Environment, rules: TrialRules, chat: ChatFormat) -> int:
    """Tokens of the longest context, one to draw among them, in the shortest of a few trials.

    Args:
        chat: `chat_in_words()`, as is that of the rules.
    """
    source = random.Random(0)
    tasks = [random_task(environment, "train", source) for _ in range(NUM_TRIALS)]
    trials = [scripted_trial(environment, task, 0, rules, chat) for task in tasks]
    return min(max(turn.start for turn in trial.turns) + 1 for trial in trials)


def chat_in_words() -> ChatFormat:
    """A chat in which each word is a token, numbered as they come."""
    ids: dict[str, int] = {}

    def tokenize(text: str) -> Tokens:
        words = (word for part in _MARKS.split(text) for word in part.split())
        return Tokens(tuple(ids.setdefault(word, len(ids)) for word in words))

    def decode(tokens: Sequence[int]) -> str:
        words = list(ids)
        return " ".join(words[token] for token in tokens)

    return ChatFormat(tokenize, decode, _render, stop_tokens=())


def _render(messages: list[Message], opens: bool, tools: Tools) -> str:
    said = "".join(f"<|{each['role']}|> {each['content']}" for each in messages)
    return said + ("<|assistant|>" if opens else "")
