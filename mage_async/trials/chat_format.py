"""Turn messages into token ids and back, by the chat template of a model.

The template renders a chat once, with markers in place of the messages, and the text around the
markers is kept. A turn then costs one `encode` of a short string, and every context grows only at
its end: earlier turns are never rendered again, although some templates (Qwen3's drops earlier
thinking) would write them differently the second time.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby, pairwise, zip_longest
from typing import Any, NamedTuple

from mage_async.completion import Completion
from mage_async.errors import PolicyError

Message = Mapping[str, str]
Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools, in OpenAI's form."""
Render = Callable[[list[Message], bool, Tools], str]
"""Maps messages, whether to end with the opening of the assistant's turn, and tools to text."""

_USER, _ASSISTANT, _NEXT_USER = "MAGESAID", "MAGEANSWERED", "MAGEASKED"
"""Markers in place of messages, in words that no template writes itself."""
_TOOL_ANSWERS = ("MAGETOLDFIRST", "MAGETOLDSECOND")
"""Markers in place of the answers of two tools."""

MOST_NAMED = 8
"""Largest number of missing characters that `ChatFormat.lost` names."""

Span = tuple[int, int]
"""First character, and one past the last."""


class Tokens(NamedTuple):
    """Hold the token ids of a text, and the spans of its special tokens."""

    ids: tuple[int, ...]
    specials: tuple[Span, ...] = ()
    """Spans of at least two characters, so that text can be cut inside each of them."""
    first: tuple[int, ...] | None = None
    """Ids where nothing is before the text, if they may be others than after other text: the
    tokenizers of Llama 2 and Mistral add a space before a text."""


Tokenize = Callable[[str], Tokens]


class ChatFormat:
    """Write a chat that only grows as token ids; contents of messages never become special tokens.

    Only `conversation`, from which policies are cloned, recognises special tokens in the messages
    of the assistant.

    Args:
        tokenize: text -> `Tokens`, special tokens recognised, none added.
        decode: ids -> text, special tokens kept.
        render: the chat template.
        stop_tokens: ids with which the policy may end its turn; unless there is none, a special
            token with which the template ends every message is added.
        tools: offered in every context.
        tokenizer_file: returns the content of the model's tokenizer.json; None if there is none.

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
        tokenizer_file: Callable[[], str] | None = None,
    ) -> None:
        self.tokenizer_file = tokenizer_file
        self.stop_tokens = tuple(stop_tokens)
        self._tokenize = lru_cache(maxsize=4096)(tokenize)
        # Environments repeat their messages, and each one is encoded twice: to find out whether the
        # context has room for it, and to append it.
        self._encode_between = lru_cache(maxsize=1024)(partial(encode_between, self._tokenize))
        self.decode = decode
        self._render, self._with_tools = render, dict[str, ChatFormat]()
        self._offers: dict[str, bool] = {}
        """Whether the template can offer tools (`_can_offer`), by the JSON of the tools."""
        # The template's text before the first user message (`_head`), from a user message to the
        # assistant's turn (`_tail`), from an answer to the next user message (`_between`), and
        # after a user message that ends the chat (`_after`).
        self._head, self._tail = _split_at(render([_user(_NEXT_USER)], True, tools), _NEXT_USER)
        # Rendered without tools, because templates write tools into the head alone.
        self._between, self._after = _bridge(render)
        # The template may end every message with a token that the model's files do not name: those
        # of Qwen2.5's base models name `<|endoftext|>`, and their template writes `<|im_end|>`.
        between = self._tokenize(self._between)
        is_special = any(start == 0 for start, _ in between.specials)
        if stop_tokens and is_special and self.encode(self._after)[:1] == between.ids[:1]:
            self.stop_tokens = tuple(dict.fromkeys((*stop_tokens, between.ids[0])))
        self._tool_pieces = _tool_bridge(render, self._head, tools) if tools else None

    @property
    def has_tools(self) -> bool:
        """Whether contexts offer tools."""
        return self._tool_pieces is not None

    @property
    def end_token(self) -> int:
        """The stop token with which the template ends the assistant's turn; if it writes none, the
        first one.
        """
        return (*self._ending(), *self.stop_tokens)[0]

    def _ending(self) -> tuple[int, ...]:
        """Return the stop token that the template writes after an answer; empty if it writes
        none.
        """
        first = self.encode(self._between)[:1]
        return first if first and first[0] in self.stop_tokens else ()

    def offering(self, tools: Tools) -> "ChatFormat":
        """Return this chat format with tools in every context; equal tools give the same object."""
        key = json.dumps(tools)
        if tools and key not in self._with_tools:
            self._with_tools[key] = ChatFormat(
                self._tokenize,
                self.decode,
                self._render,
                self.stop_tokens,
                tools,
                self.tokenizer_file,
            )
        return self._with_tools[key] if tools else self

    def decode_completion(self, ids: Sequence[int]) -> str:
        """Return the text of a completion without the stop token at its end, if it has one."""
        return self.decode(ids[:-1] if self.is_stopped(ids) else ids)

    def is_stopped(self, ids: Sequence[int]) -> bool:
        """Return whether a completion ends with a stop token; an empty one does not."""
        return bool(ids) and ids[-1] in self.stop_tokens

    def opened_thinking(self, completion: Completion) -> str:
        """Return the `<think>` that the template wrote before a completion, if the completion was
        cut at the limit of tokens; "" otherwise. DeepSeek-R1's template begins each answer with it.

        A completion that has ended by itself without `</think>` is an answer without thinking.
        """
        is_open = "<think>" in self._tail.rpartition("</think>")[2]
        return "<think>" if is_open and completion.finish == "length" else ""

    def encode(self, text: str, *, is_first: bool = False) -> tuple[int, ...]:
        """Return the ids of the program's own text: special tokens are recognised, none is added.

        Args:
            is_first: whether nothing is before the text; otherwise it follows other text.
        """
        found = self._tokenize(text)
        return found.first if is_first and found.first is not None else found.ids

    def encode_data(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text as data: none of them is a special token."""
        return encode_as_data(self._tokenize, text)

    def holds_special_token(self, content: str) -> bool:
        """Return whether a text contains the text of a special token, which a chat encodes as plain
        text.
        """
        return bool(self._tokenize(content).specials)

    @property
    def template(self) -> str:
        """The template's own text around the messages."""
        return self._head + self._tail + self._between + self._after

    def lost(self, text: str, where: str) -> str:
        """Return a sentence on the characters of a text that the vocabulary lacks; "" if it has
        all.

        Args:
            where: source of the text, in words.
        """
        unknown = self.encode("\U0010ffff")  # of a character that no vocabulary has
        # Some tokenizers drop spaces between words, and add them again when they decode.
        others = sorted(set(text) - {" "})
        lost = [repr(each) for each in others if self.encode(each) in ((), unknown)]
        if not lost:
            return ""
        more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
        return (
            f"the tokenizer has no token for {', '.join(lost[:MOST_NAMED])}{more}, which {where} "
            f"has: the policy reads {self.decode(unknown) or 'nothing'} there"
        )

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the tokens that a conversation has in a trial, up to the assistant's last message,
        and a mask of the assistant's tokens: its messages, and the stop token after each.

        Special tokens in messages of the assistant, such as `<think>`, are recognised, because a
        policy samples them. In messages of others they are data.

        Raises:
            PolicyError: the template refuses or drops a message, or writes `<think>` where the
                assistant's own message begins with it.
        """
        ids, is_own, others = list[int](), list[bool](), list[Message]()
        for message in messages:
            if message["role"] != "assistant":
                others.append(message)
                continue
            if "<think>" in self._tail and message["content"].lstrip().startswith("<think>"):
                raise PolicyError(
                    "the chat template writes <think> before an answer, and the answer begins with "
                    "<think> too: set transcript.thinking = true, or remove <think> from the answer"
                )
            given = self.continuation(ids[-1], others) if ids else self.prompt(others)
            own = (*self._encode_answer(message["content"]), *self._ending())
            ids += (*given, *own)
            is_own += [False] * len(given) + [True] * len(own)
            others.clear()
        return ids, is_own

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Return a conversation of any roles, up to the start of the assistant's turn.

        If the template offers no tools, a system message describes them in words. If it refuses a
        role, such as the system's, messages of that role are written as the user's.

        Raises:
            PolicyError: the template refuses such a conversation.
        """
        own = list(messages)
        if tools and not self._can_offer(tools):
            # The description is added to the system message; if there is none, it becomes one.
            description = _tools_in_words(tools)
            if own[0]["role"] == "system":
                description = f"{own.pop(0)['content']}\n\n{description}"
            own.insert(0, {"role": "system", "content": description})
            tools = ()
        pieces, contents = self._cut(own, tools)
        return encode_between(self._tokenize, pieces, contents, is_first=True)

    def continuation(
        self, last_token: int, messages: Sequence[Message], tools: Tools = ()
    ) -> tuple[int, ...]:
        """Return what follows a completion: the end of its turn, messages of any roles, and the
        opening of the next turn; see `answer` and `prompt`.
        """
        tools = tools if tools and self._can_offer(tools) else ()
        # Some templates write messages after an answer in another way than the first ones, so two
        # messages stand in for the chat so far. `_cut` leaves their text out of its pieces.
        before = [_user(""), {"role": "assistant", "content": ""}]
        pieces, contents = self._cut([*before, *messages], tools, first=2)
        return self._following(last_token, "", pieces, contents)

    def _can_offer(self, tools: Tools) -> bool:
        """Return whether the template writes all tools, and nothing in them is a special token."""
        key = json.dumps(tools)
        if key not in self._offers:
            text = self._render([_user("")], True, tools)
            names = (each["function"]["name"] for each in tools)
            self._offers[key] = (
                all(map(text.__contains__, names)) and not self._tokenize(key).specials
            )
        return self._offers[key]

    def _cut(
        self, messages: Sequence[Message], tools: Tools, first: int = 0
    ) -> tuple[list[str], list[str]]:
        """Render messages, and cut the text at their contents. If the template refuses or drops a
        message, join all messages between two of the assistant into one of the user, and try again.

        Args:
            first: number of the first message to keep; if it is not 0, the text up to the end of
                the message before it, an answer of the assistant, is left out.

        Returns:
            The template's pieces, and the contents between them.
        """
        try:
            return self._cut_as_given(messages, tools, first)
        except PolicyError:
            if (joined := _joined_by_side(messages)) == list(messages):
                raise
        return self._cut_as_given(joined, tools, first)

    def _cut_as_given(
        self, messages: Sequence[Message], tools: Tools, first: int
    ) -> tuple[list[str], list[str]]:
        """Render and cut messages as they are; see `_cut`.

        Raises:
            PolicyError: the template refuses the conversation, or drops a message.
        """
        # `END` keeps a message's number apart from digits that the template may write after it.
        marked: list[Message] = [
            {**each, "content": f"MAGESAID{n}END"} for n, each in enumerate(messages)
        ]
        whole = re.split(r"MAGESAID(\d+)END", self._render(marked, True, tools))
        pieces, numbers = whole[::2], [int(number) for number in whole[1::2]]
        is_start_found = not first or first - 1 in numbers
        start = numbers.index(first - 1) + 1 if first and is_start_found else 0
        if not is_start_found or numbers[start:] != list(range(first, len(messages))):
            raise PolicyError(
                "the chat template drops or repeats a message of this conversation: send only "
                "roles that it writes"
            )
        return pieces[start:], [messages[number]["content"] for number in numbers[start:]]

    def opening(self, content: str, prefill: str = "") -> tuple[int, ...]:
        """Return a context's first user message, and the opening of the assistant's turn.

        Args:
            prefill: beginning of the assistant's turn; none of it is sampled.
        """
        pieces = self._head, self._tail
        ids = encode_between(self._tokenize, pieces, (content,), is_first=True)
        return ids + self._encode_answer(prefill)

    def _encode_answer(self, text: str) -> tuple[int, ...]:
        """Return the ids of the beginning of the assistant's turn, as `encode`."""
        if not text:
            return ()
        specials = self._tokenize(self._tail).specials
        if specials and specials[-1][1] == len(self._tail):
            # A tokenizer may add a space behind a special token, so the text is encoded with the
            # one that ends the template's piece before it.
            start, stop = specials[-1]
            whole = self._tokenize(self._tail[start:] + text)
            if whole.specials[:1] == ((0, stop - start),):
                return whole.ids[1:]
        return self.encode(text)

    def answer(self, last_token: int, forced: str, content: str, prefill: str) -> tuple[int, ...]:
        """Return what follows a completion: the rest of its turn, the next user message, and the
        opening of the next turn.

        Args:
            last_token: the completion's last id; a stop token that the template would write again
                is not repeated.
            forced: text that the transcript adds to the assistant's turn, such as a closing tag.
            content: the user message.
            prefill: beginning of the assistant's next turn; none of it is sampled.
        """
        pieces = (forced + self._between, self._tail + prefill)
        return self._following(last_token, forced, pieces, (content,))

    def tool_answers(self, last_token: int, answers: Sequence[str]) -> tuple[int, ...]:
        """Return what follows a completion with tool calls; see `answer`. Each answer is a message
        of a tool.
        """
        assert self._tool_pieces is not None, "the chat offers no tools"
        between, joint, tail = self._tool_pieces
        pieces = (between, *(joint,) * (len(answers) - 1), tail)
        return self._following(last_token, "", pieces, answers)

    def ending(self, last_token: int, forced: str, content: str) -> tuple[int, ...]:
        """Return what follows a completion with the last user message of a context, which has no
        answer; see `answer`.
        """
        pieces = (forced + self._between, self._after)
        return self._following(last_token, forced, pieces, (content,))

    def _following(
        self, last_token: int, forced: str, pieces: Sequence[str], contents: Sequence[str]
    ) -> tuple[int, ...]:
        """Encode the text after a completion, without a stop token that ends the completion
        already.
        """
        ids = self._encode_between(tuple(pieces), tuple(contents))
        # The template ends a turn with a stop token. If the policy has sampled it already, a second
        # one would be a text that the template never writes.
        is_ended = not forced and last_token in self.stop_tokens and ids[0] == last_token
        return ids[1:] if is_ended else ids


def _joined_by_side(messages: Sequence[Message]) -> list[Message]:
    """Join all messages between two of the assistant, of whatever roles, into one of the user."""
    joined = list[Message]()
    for is_own, part in groupby(messages, lambda each: each["role"] == "assistant"):
        own = list(part)
        joined += own if is_own else [_user("\n\n".join(each["content"] for each in own))]
    return joined


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _tools_in_words(tools: Tools) -> str:
    """Return the schemas of tools, and the form of a call, for a template without tools."""
    lines = "\n".join(json.dumps(each) for each in tools)
    return (
        f"You may call these functions:\n{lines}\nFor each call write "
        '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
    )


def _split_at(text: str, marker: str) -> tuple[str, str]:
    """Split a text at a marker."""
    before, found, after = text.partition(marker)
    if not found:
        raise PolicyError(
            "the chat template drops or changes the user's words, so it cannot be used: let "
            "chat_template.jinja write every message's content unchanged"
        )
    return before, after


def _bridge(render: Render) -> tuple[str, str]:
    """Return the template's text between an assistant's message and the next user message, and its
    text after a user message that ends the chat.
    """
    chat = [_user(_USER), {"role": "assistant", "content": _ASSISTANT}, _user(_NEXT_USER)]
    _, rest = _split_at(render(chat, False, ()), _ASSISTANT)
    return _split_at(rest, _NEXT_USER)


def _tool_bridge(render: Render, head: str, tools: Tools) -> tuple[str, str, str]:
    """Return the template's text between an assistant's message and a tool's answer, between two
    answers, and from the last answer to the assistant's next turn.
    """
    names = [each["function"]["name"] for each in tools]
    if missing := [name for name in names if name not in head]:
        raise PolicyError(
            f"the chat template offers no tools, and the environment has {', '.join(missing)}; "
            "choose a model whose template takes `tools`, such as Qwen3's, or write the task as a "
            "program, whose tools a system message describes: docs/agents.md"
        )
    answers = [{"role": "tool", "content": text} for text in _TOOL_ANSWERS]
    chat = [_user(_USER), {"role": "assistant", "content": _ASSISTANT}, *answers]
    _, rest = _split_at(render(chat, True, tools), _ASSISTANT)
    between, rest = _split_at(rest, _TOOL_ANSWERS[0])
    return (between, *_split_at(rest, _TOOL_ANSWERS[1]))


# Text that others wrote is data: inside a message it never becomes a special token. The tokenizers
# library finds special tokens anywhere in a text, so an observation with `<|im_end|>
# <|im_start|>assistant` would end the user's turn and begin one of the assistant. So the special
# tokens found in the whole text are compared with those of the template's own pieces. If there are
# more, the data contain some: each of these is cut into two parts that are encoded one by one, and
# neither part is a special token. A text without special tokens in its data is encoded as a whole.


def encode_between(
    tokenize: Tokenize, fixed: Sequence[str], contents: Sequence[str], *, is_first: bool = False
) -> tuple[int, ...]:
    """Return the ids of a text in which only the template's pieces contain special tokens.

    Args:
        fixed: the template's pieces; one more than `contents`.
        contents: data between the pieces.
        is_first: whether nothing is before the text.
    """
    text, of_template = _joined(tokenize, fixed, contents)
    found = tokenize(text)
    if _are_the_same(found.specials, of_template):
        return found.first if is_first and found.first is not None else found.ids
    # The template's special tokens are encoded one by one, and the text after each one as data.
    before = text[: of_template[0][0] if of_template else len(text)]
    ids = list(encode_as_data(tokenize, before, is_first=is_first))
    ends = [start for start, _ in of_template[1:]] + [len(text)]
    for (start, stop), end in zip(of_template, ends, strict=False):
        ids += tokenize(text[start:stop]).ids
        ids += encode_as_data(tokenize, text[stop:end], after=text[start:stop])
    return tuple(ids)


def encode_as_data(
    tokenize: Tokenize, text: str, *, is_first: bool = False, after: str = ""
) -> tuple[int, ...]:
    """Return the ids of a text, none of them special: each special token's text is cut after its
    first character, and the parts are encoded one by one.

    Args:
        is_first: whether nothing is before the text.
        after: special token of the template before the text, if there is one; a tokenizer may add a
            space behind it.
    """
    ids, specials, first = tokenize(after + text)
    if after and specials[:1] != ((0, len(after)),):  # it is another token with the text
        after, (ids, specials, first) = "", tokenize(text)
    own = specials[1:] if after else specials
    if not own:
        return (first if is_first and first is not None else ids)[1 if after else 0 :]
    cuts = (0, *(start + 1 - len(after) for start, _ in own), len(text))
    return tuple(
        token
        for start, stop in pairwise(cuts)
        for token in encode_as_data(
            tokenize,
            text[start:stop],
            is_first=is_first and not start,
            after="" if start else after,
        )
    )


def _joined(
    tokenize: Tokenize, fixed: Sequence[str], contents: Sequence[str]
) -> tuple[str, list[Span]]:
    """Return the whole text, and the spans of the template's special tokens in it."""
    text, spans = "", list[Span]()
    for piece, data in zip_longest(fixed, contents, fillvalue=""):
        shift = len(text)
        spans += [(start + shift, stop + shift) for start, stop in tokenize(piece).specials]
        text += piece + data
    return text, spans


def _are_the_same(found: Sequence[Span], of_template: Sequence[Span]) -> bool:
    """Return whether the special tokens found in a text are those of the template. A span that is
    found may extend over white space of the data next to it.
    """
    pairs = zip(found, of_template, strict=False)
    return len(found) == len(of_template) and all(
        each[0] <= own[0] and each[1] >= own[1] for each, own in pairs
    )
