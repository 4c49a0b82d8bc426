"""Compute which tokens a turn allows, from its legal actions or from the form of its answer.

A list of actions becomes a trie of tokens. A pattern (a regular expression) becomes an automaton
over tokens, made by llguidance, the library that SGLang and vLLM use too. `restriction.py` says how
the policy samples from them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from mage_async.environments.environment import Play
from mage_async.environments.legal_pattern import lengths, pattern_fault, regex_form
from mage_async.errors import EnvironmentFault
from mage_async.restriction import Restriction, TokenTrie
from mage_async.trajectory import Kind
from mage_async.trials.action_parser import NAMES, ActionParser
from mage_async.trials.chat_format import ChatFormat

MAX_CACHED_TRIES = 1024
"""Number of tries, one for each list of actions, that are cached, because lists repeat from turn to
turn."""


def restriction_of(play: Play, chat: ChatFormat, parser: ActionParser) -> Restriction | None:
    """Return the restriction to legal actions; `None` where these are not known.

    They are known if the play names all of them, or a pattern of them, and if the transcript writes
    the opening tag of an action, so that the completion begins with the action itself. Where the
    policy writes the tag, it may think before it, and nothing is restricted.

    Raises:
        EnvironmentFault: an action cannot be written with the tokens of this policy, or a pattern
            cannot be used.
    """
    if not parser.prefill(Kind.ACT):
        return None
    if pattern := getattr(play, "legal_pattern", None):
        return actions_restriction(pattern, chat, parser)
    actions = play.legal_actions()
    # A sequence with `is_whole = False` has more actions than it lists; see `Play.legal_actions`.
    if not actions or not getattr(actions, "is_whole", True):
        return None
    return actions_restriction(tuple(actions), chat, parser)


def actions_restriction(
    actions: tuple[str, ...] | str, chat: ChatFormat, parser: ActionParser
) -> Restriction:
    """Return the restriction to given actions, or to those that match a pattern.

    Where the transcript does not write the opening tag, a completion that matches a pattern begins
    with this tag, so that it is an action too.

    Raises:
        EnvironmentFault: an action cannot be written with the tokens of this policy, or a pattern
            cannot be used.
    """
    if isinstance(actions, str):
        tag = NAMES[Kind.ACT]
        opening = "" if parser.prefill(Kind.ACT) else f"<{tag}>"
        matcher, max_length = _compiled(actions, chat, f"</{tag}>", opening)
        return TokenPattern(matcher.deep_copy(), max_length)
    return _trie(actions, chat, parser)


@lru_cache(maxsize=MAX_CACHED_TRIES)
def _trie(actions: tuple[str, ...], chat: ChatFormat, parser: ActionParser) -> TokenTrie:
    return TokenTrie(action_tokens(action, chat, parser) for action in actions)


def action_tokens(action: str, chat: ChatFormat, parser: ActionParser) -> Sequence[int]:
    """Return the tokens of an action, with a space before it, and of the tag that ends it.

    Raises:
        EnvironmentFault: the decoded tokens are not parsed as the same action.
    """
    tokens = chat.encode(f" {action}</{NAMES[Kind.ACT]}>")
    parsed = parser.parse(Kind.ACT, chat.decode(tokens))
    if not action or parsed != action or chat.holds_special_token(action):
        raise EnvironmentFault(
            f"the legal action {action!r:.100} cannot be written: its tokens decode to "
            f"{parsed!r:.100}. Rename it, declare its words, or set sampling.restricted = false"
        )
    return tokens


class TokenPattern:
    """Restrict a completion to texts that match a pattern by an automaton, with the methods of a
    `TokenTrie`.

    Nodes are numbers, the root is 0; they are created as a completion reaches them. Where the text
    can only go on in one way, its tokens are forced.

    Args:
        matcher: the automaton, before the first token.
        max_length: bound on the length of a sequence, in tokens; a longer one ends there.
    """

    def __init__(self, matcher: LLMatcher, max_length: int) -> None:
        self._matchers, self._depths = [matcher], [0]
        """State of the automaton, and number of tokens so far, at each node."""
        self._children: dict[tuple[int, int], int] = {}
        """Node that a token leads to, by node and token."""
        self._sets: dict[int, np.ndarray] = {}
        """Allowed tokens of the nodes at which they were computed."""
        self.max_length = max_length

    def after(self, node: int, token: int) -> int:
        """Return the node that a token leads to."""
        if (node, token) not in self._children:
            matcher = self._matchers[node].deep_copy()
            is_allowed = matcher.consume_token(token)  # moves the automaton
            assert is_allowed, "the token was not allowed"
            self._children[node, token] = len(self._matchers)
            self._matchers.append(matcher)
            self._depths.append(self._depths[node] + 1)
        return self._children[node, token]

    def is_end(self, node: int) -> bool:
        """Return whether a sequence ends at the node."""
        return self._depths[node] == self.max_length or self._matchers[node].is_accepting()

    def allowed(self, node: int) -> np.ndarray:
        """Return the tokens that may follow, ascending: int32."""
        if node not in self._sets:
            bits = np.frombuffer(self._matchers[node].compute_bitmask(), np.uint8)
            found = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            self._sets[node] = found.astype(np.int32)
        return self._sets[node]

    def forced(self, node: int) -> tuple[list[int], int]:
        """Return the tokens that follow without a choice, and the node after them."""
        tokens: list[int] = []
        while not self.is_end(node):
            # "Fast-forward" tokens: those that follow in every text that matches.
            following = self._matchers[node].compute_ff_tokens()
            if not following:
                if len(self.allowed(node)) != 1:
                    break
                following = self.allowed(node).tolist()
            for token in following[: self.max_length - self._depths[node]]:
                node = self.after(node, token)
                tokens.append(token)
        return tokens, node


def answer_restriction(form: str, chat: ChatFormat, max_length: int) -> TokenPattern:
    """Return the restriction to answers of a form, followed by the end of the turn.

    Args:
        form: an expression of llguidance's grammars, such as `/a|b/` or `%json {...}`.
        max_length: in tokens; a longer completion ends there, unfinished.

    Raises:
        EnvironmentFault: the form cannot be read, or the policy has no stop token.
    """
    return TokenPattern(_answer_matcher(form, chat).deep_copy(), max_length)


def tool_form(
    chat: ChatFormat, parameters: Mapping[str, dict[str, Any]], *, is_parallel: bool
) -> str:
    """Return the form of one tool call, or of one or more, with the spaces that chat templates
    write.

    Args:
        parameters: schema of the arguments of each tool, by its name.
        is_parallel: whether there may be several calls.
    """
    # In llguidance's grammars `<[7]>` is the token with id 7.
    opening, between, closing = (
        " ".join(f"<[{token}]>" for token in chat.encode(text))
        for text in ("<tool_call>\n", "\n", "\n</tool_call>")
    )
    bodies = list[str]()
    for name, schema in parameters.items():
        # Grammars write a text as JSON does. The arguments, which the tool checks itself, are a
        # document of their own, because a `$ref` refers to the root of a tool's schema.
        begin = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        bodies.append(f'{begin} {json_form(schema, is_lenient=True)} "}}"')
    call = f"{opening} ({' | '.join(bodies)}) {closing}"
    return f"{call} ({between} {call})*" if is_parallel else call


def json_form(schema: dict[str, Any], *, is_lenient: bool = False) -> str:
    """Return the form of JSON that follows a schema, with spaces as `json.dumps` writes them.

    Args:
        is_lenient: whether keywords that cannot be enforced, such as `uniqueItems`, are left out;
            otherwise they are errors.
    """
    # If spaces were allowed everywhere, a policy might write spaces until its answer is cut off.
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    options = {**spaces, "lenient": is_lenient}
    return f"%json {json.dumps({'x-guidance': options} | schema)}"


@lru_cache(maxsize=256)
def _answer_matcher(form: str, chat: ChatFormat) -> LLMatcher:
    """Return the automaton of a form and the end of the turn after it; callers copy it first."""
    if not chat.stop_tokens:
        raise EnvironmentFault(
            "an answer of a given form ends with a stop token, and the policy has none: state the "
            "`eos_token_id` in its generation_config.json"
        )
    grammar = LLMatcher.grammar_from_lark(f"start: ({form}) <[{chat.end_token}]>")
    matcher = LLMatcher(_tokenizer(chat), grammar)
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split())
        raise EnvironmentFault(f"the form of an answer cannot be read: {reason:.200}")
    return matcher


@lru_cache(maxsize=256)
def _compiled(pattern: str, chat: ChatFormat, closing: str, opening: str) -> tuple[LLMatcher, int]:
    """Return the automaton of a pattern of actions, and the largest number of tokens that it takes.

    A completion is a space, an action that matches the pattern, and a closing tag. Callers copy the
    automaton before they use it.

    Args:
        pattern: a regular expression that the whole action matches.
        closing: the text that ends an action.
        opening: a text before the space.

    Raises:
        EnvironmentFault: the pattern cannot be read, matches nothing that this tokenizer can write,
            or matches too long actions.
    """
    if fault := pattern_fault(pattern):
        raise EnvironmentFault(fault)
    start, end = chat.encode(opening), chat.encode(closing)
    # The tags are written with the tokens that a list of actions would have.
    before, after = (" ".join(f"<[{token}]>" for token in tag) for tag in (start, end))
    form = regex_form(f" (?:{pattern})")
    grammar = LLMatcher.grammar_from_lark(f"start: {before} {form} {after}")
    matcher = LLMatcher(_tokenizer(chat), grammar)
    # A pattern that no text of this tokenizer matches allows no first token.
    if matcher.is_error() or not TokenPattern(matcher.deep_copy(), 0).allowed(0).size:
        raise EnvironmentFault(
            f"the legal_pattern {pattern!r:.100} matches nothing that this tokenizer can write"
        )
    # 1 for the space before the action
    return matcher, len(start) + 1 + _longest(pattern) + len(end)


_ASCII_ONLY = re.compile(r"(?:[^.^\\(\x80-\U0010ffff]|\((?!\?)|\(\?:|\\[^\w])*")
"""A pattern that matches ASCII text alone: one without ".", "[^", classes such as \\w, or flags."""


def _longest(pattern: str) -> int:
    """Return a bound on the tokens of a text that matches: at most one for each byte."""
    _, characters = lengths(pattern)
    # A character takes at most 4 bytes in UTF-8, and one if it is ASCII.
    return characters * (1 if _ASCII_ONLY.fullmatch(pattern) else 4)


@lru_cache(maxsize=4)
def _tokenizer(chat: ChatFormat) -> LLTokenizer:
    if chat.tokenizer_file is None:
        raise EnvironmentFault(
            "sampling from a pattern or a form of answers needs a model with a tokenizer.json"
        )
    return LLTokenizer(_made_readable(chat.tokenizer_file()))


def _made_readable(tokenizer_file: str) -> str:
    """Rewrite a tokenizer.json so that llguidance can read each of its tokens."""
    file = json.loads(tokenizer_file)
    # llguidance does not know the decoder Metaspace, so decoders that it knows replace it.
    if (file["decoder"] or {}).get("type") == "Metaspace":
        space = {"pattern": {"String": file["decoder"]["replacement"]}, "content": " "}
        decoders = [{"type": "Replace"} | space, {"type": "ByteFallback"}, {"type": "Fuse"}]
        file["decoder"] = {"type": "Sequence", "decoders": decoders}
    elif not file["model"].get("byte_fallback"):
        return tokenizer_file
    ids = file["model"]["vocab"]
    if isinstance(ids, list):  # of a unigram model, with a score for each token
        ids = {token: number for number, (token, _) in enumerate(ids)}
    # Two tokens may stand for the same byte, as `>` and `<0x3E>` do in Llama 2's vocabulary, and
    # llguidance accepts only one of the two. So the one that is named by its number becomes a
    # special token, which is not part of any text.
    added = {each["content"] for each in file["added_tokens"]}
    for number in range(128):
        name = f"<0x{number:02X}>"
        has_twin = chr(number) in ids or (number == ord(" ") and "▁" in ids)
        if has_twin and name in ids and name not in added:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            file["added_tokens"].append({"id": ids[name], "content": name, "special": True} | flags)
    return json.dumps(file)
