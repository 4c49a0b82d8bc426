"""The one place that knows a chat template: text of messages to token ids, and back.

The template renders a chat of marked messages once. The text around the markers is cut into four
constants, so that a turn costs one `encode` of a short string and every context grows at its end
only: earlier turns are never rendered again, although some templates (Qwen3's drops earlier
thinking) would write them differently the second time.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from mage_async.errors import PolicyError
from mage_async.trials.text_encoder import Tokenize, encode_between

Message = Mapping[str, str]
Render = Callable[[list[Message], bool], str]
"""Messages, and whether to end with the opening of the assistant's turn -> text."""

_SAID, _ANSWERED, _ASKED = "MAGESAID", "MAGEANSWERED", "MAGEASKED"


class ChatFormat:
    """Token ids of a chat that only ever grows; what is said in it writes no special token.

    Args:
        tokenize: text -> ids, special tokens recognised, none added.
        decode: ids -> text, special tokens kept.
        render: the chat template.
        stop_tokens: ids with which the policy may end its turn.
    """

    def __init__(
        self,
        tokenize: Tokenize,
        decode: Callable[[Sequence[int]], str],
        render: Render,
        stop_tokens: Sequence[int],
    ) -> None:
        self.stop_tokens = tuple(stop_tokens)
        self._tokenize = lru_cache(maxsize=4096)(tokenize)
        self.decode = decode
        self._head, self._tail = _around(render([_user(_ASKED)], True), _ASKED)
        self._between, self._after = _bridge(render)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of text of our own: special tokens are recognised, none is added."""
        return self._tokenize(text).ids

    def holds_special_token(self, said: str) -> bool:
        """Whether a text holds that of a special token; a chat writes it as plain text."""
        return bool(self._tokenize(said).specials)

    def opening(self, said: str) -> tuple[int, ...]:
        """A context's first user message, up to where the assistant speaks."""
        return encode_between(self._tokenize, self._head, said, self._tail)

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
        return self._following(last_token, forced, said, self._tail + prefill)

    def ending(self, last_token: int, forced: str, said: str) -> tuple[int, ...]:
        """As `answer`, with the last user message of a context, which is not answered."""
        return self._following(last_token, forced, said, self._after)

    def _following(self, last_token: int, forced: str, said: str, after: str) -> tuple[int, ...]:
        ids = encode_between(self._tokenize, forced + self._between, said, after)
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
    _, rest = _around(render(chat, False), _ANSWERED)
    return _around(rest, _ASKED)
