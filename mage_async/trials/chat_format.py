"""The one place that knows a chat template: text of messages to token ids, and back.

The template renders a chat of marked messages once. The text around the markers is cut into four
constants, so that a turn costs one `encode` of a short string and every context grows at its end
only: earlier turns are never rendered again, although some templates (Qwen3's drops earlier
thinking) would write them differently the second time.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from mage_async.errors import PolicyError
from mage_async.trials.text_encoder import Tokenize, encode_between

Message = Mapping[str, str]
Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools, in OpenAI's form."""
Render = Callable[[list[Message], bool, Tools], str]
"""Messages, whether to end with the opening of the assistant's turn, and tools -> text."""

_SAID, _ANSWERED, _ASKED = "MAGESAID", "MAGEANSWERED", "MAGEASKED"
_TOLD = ("MAGETOLDFIRST", "MAGETOLDSECOND")


class ChatFormat:
    """Token ids of a chat that only ever grows; what is said in it writes no special token.

    Args:
        tokenize: text -> ids, special tokens recognised, none added.
        decode: ids -> text, special tokens kept.
        render: the chat template.
        stop_tokens: ids with which the policy may end its turn.
        tools: offered in every context.

    Raises:
        PolicyError: the template cannot write such a chat, or offers no tools.
    """

    def __init__(
        self,
        tokenize: Tokenize,
        decode: Callable[[Sequence[int]], str],
        render: Render,
        stop_tokens: Sequence[int],
        tools: Tools = (),
    ) -> None:
        self.stop_tokens = tuple(stop_tokens)
        self._tokenize = lru_cache(maxsize=4096)(tokenize)
        self.decode = decode
        self._render, self._with_tools = render, dict[str, ChatFormat]()
        self._head, self._tail = _around(render([_user(_ASKED)], True, tools), _ASKED)
        self._between, self._after = _bridge(render)
        self._tool_pieces = _tool_bridge(render, self._head, tools) if tools else ()

    def offering(self, tools: Tools) -> "ChatFormat":
        """The same chat with tools; rendered once."""
        key = json.dumps(tools)
        if tools and key not in self._with_tools:
            self._with_tools[key] = ChatFormat(
                self._tokenize, self.decode, self._render, self.stop_tokens, tools
            )
        return self._with_tools[key] if tools else self

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of text of our own: special tokens are recognised, none is added."""
        return self._tokenize(text).ids

    def holds_special_token(self, said: str) -> bool:
        """Whether a text holds that of a special token; a chat writes it as plain text."""
        return bool(self._tokenize(said).specials)

    def opening(self, said: str) -> tuple[int, ...]:
        """A context's first user message, up to where the assistant speaks."""
        return encode_between(self._tokenize, (self._head, self._tail), (said,))

    def answer(self, last_token: int, forced: str, said: str, prefill: str) -> tuple[int, ...]:
        """What follows a completion: the rest of its turn, the next user message, the next turn's
        opening.

        Args:
            last_token: the completion's last id; a stop token that the template would write again
            is not repeated.
            forced: text the transcript itself adds to the assistant's turn, such as a closing tag.
            said: the user's words.
            prefill: how the assistant's next turn begins; None of it is sampled.
        """
        pieces = (forced + self._between, self._tail + prefill)
        return self._following(last_token, forced, pieces, (said,))

    def tool_answers(self, last_token: int, answers: Sequence[str]) -> tuple[int, ...]:
        """As `answer`, with what each call of the turn led to, as messages of tools."""
        between, joint, tail = self._tool_pieces
        pieces = (between, *(joint,) * (len(answers) - 1), tail)
        return self._following(last_token, "", pieces, answers)

    def ending(self, last_token: int, forced: str, said: str) -> tuple[int, ...]:
        """As `answer`, with the last user message of a context, which is not answered."""
        pieces = (forced + self._between, self._after)
        return self._following(last_token, forced, pieces, (said,))

    def _following(
        self, last_token: int, forced: str, pieces: Sequence[str], said: Sequence[str]
    ) -> tuple[int, ...]:
        ids = encode_between(self._tokenize, pieces, said)
        return ids[1:] if not forced and ids[0] == last_token in self.stop_tokens else ids


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _around(text: str, marker: str) -> tuple[str, str]:
    before, found, after = text.partition(marker)
    if not found:
        raise PolicyError("the chat template drops or changes the user's words; it cannot be used")
    return before, after


def _bridge(render: Render) -> tuple[str, str]:
    """What stands between an assistant's words and the user's next ones, and after those at the
    very end.
    """
    chat = [_user(_SAID), {"role": "assistant", "content": _ANSWERED}, _user(_ASKED)]
    _, rest = _around(render(chat, False, ()), _ANSWERED)
    return _around(rest, _ASKED)


def _tool_bridge(render: Render, head: str, tools: Tools) -> tuple[str, str, str]:
    """What stands between an assistant's words and the answer to a call, between two answers, and
    after the last.
    """
    names = [each["function"]["name"] for each in tools]
    if missing := [name for name in names if name not in head]:
        raise PolicyError(
            f"the chat template offers no tools, and the environment has {', '.join(missing)}; "
            "choose a model whose template takes `tools`, such as Qwen3's"
        )
    told = [{"role": "tool", "content": text} for text in _TOLD]
    chat = [_user(_SAID), {"role": "assistant", "content": _ANSWERED}, *told]
    _, rest = _around(render(chat, True, tools), _ANSWERED)
    between, rest = _around(rest, _TOLD[0])
    return (between, *_around(rest, _TOLD[1]))
