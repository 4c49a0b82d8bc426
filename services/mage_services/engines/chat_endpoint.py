"""Request completions from another server, as an engine, by OpenAI's chat protocol.

A trial is a sequence of tokens, but an endpoint takes and returns texts. So here every character is
a token, and two ids beyond Unicode begin a message of the user and one of the assistant. The same
code then plays a trial on a model of our own and on an endpoint, and no text inside a message can
begin another message.

The endpoint may fail: it is down, slow, limits its rate, cuts its answers or returns nothing. Such
a call is repeated, after as long a pause as the endpoint asks for, until nothing at all has come
back for `patience_s`, or until one call fails again and again while others are answered. Errors
that no repetition cures, such as a wrong key, end the run at once.
"""

import asyncio
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from itertools import pairwise
from typing import Annotated, Any, NoReturn, Self

import aiohttp
import msgspec
import numpy as np

from mage_async.completion import Completion, Prompt
from mage_async.errors import ConfigError, ContextFull, PolicyError, RunError
from mage_async.policy_version import VersionRun
from mage_async.trials.action_parser import outside_thinking
from mage_async.trials.chat_format import ChatFormat, Message, Tokens, Tools

USER, ASSISTANT = 0x110000, 0x110001
"""Ids that begin a message, beyond the last character of Unicode."""
_MARKS = {"<|user|>": USER, "<|assistant|>": ASSISTANT}
"""These ids, by the texts that a rendered conversation has in their places."""
_ROLES = {USER: "user", ASSISTANT: "assistant"}
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
MAX_TRIES = 8
"""Number of failures of one call that end the run, if other calls were answered between them. An
endpoint that answers no call at all has `Endpoint.patience_s`."""
MAX_EMPTY_TRIES = 3
"""Number of empty answers to one call after which the call is not repeated: the last empty answer
is returned, as an answer without an action."""
MAX_EMPTY_CALLS = 10
"""Number of calls in a row with empty answers that end the run."""
LEAST_PAUSE_S = 0.1
"""Shortest pause in seconds before a call is repeated, even if the endpoint asks for a shorter one.
"""
FIRST_PAUSE_S = 1.0
"""Seconds of pause after the first failure of a call; the pause doubles with each further one."""
MAX_PAUSE_S = 60.0
"""Longest pause in seconds to which it doubles."""
SPENT_QUOTA = "insufficient_quota"
"""Type or code of OpenAI's error if the account has no credit left. Its status is 429, as that of a
rate limit."""
TOO_LONG = "context_length_exceeded"
"""Code of the error if the context does not hold a prompt: OpenAI's, which `mage serve` and the
gateway of programs also send."""
_FULL = re.compile(
    r"context.{0,20}(length|window|size)|maximum (context|prompt length)|too many tokens"
    r"|`inputs` (tokens|must have less)|input token count\b.{0,40}exceeds"
    r"|(prompt|inputs?|request)\b[^:]{0,40}too long|messages?\b.{0,40}too long",
    re.I,
)
"""Words by which endpoints say that a prompt is longer than the model's context. They do not match
errors about another field of the request, such as "'user': string too long".
"""


def text_chat() -> ChatFormat:
    """Return the chat format in which every character is a token."""

    def tokenize(text: str) -> Tokens:
        # `spans` has the place of each mark in the text; `end` is where the last one ends.
        ids, spans, end = list[int](), [], 0
        for found in _MARK.finditer(text):
            ids += [*map(ord, text[end : found.start()]), _MARKS[found[0]]]
            spans.append(found.span())
            end = found.end()
        return Tokens((*ids, *map(ord, text[end:])), tuple(spans))

    def decode(ids: Sequence[int]) -> str:
        return "".join(f"<|{_ROLES[each]}|>" if each in _ROLES else chr(each) for each in ids)

    def render(messages: list[Message], opens_turn: bool, tools: Tools) -> str:
        if tools:
            raise PolicyError(
                "the environment has tools, which are not sent to a chat endpoint: choose a game "
                "whose actions are words"
            )
        texts = [f"<|{each['role']}|>{each['content']}" for each in messages]
        return "".join([*texts, "<|assistant|>" if opens_turn else ""])

    return ChatFormat(tokenize, decode, render, ())


def messages_of(tokens: np.ndarray) -> list[dict[str, str]]:
    """Return the messages of a context of `text_chat`, without the last one, which the endpoint is
    to write: the context ends with the id that begins it.

    Args:
        tokens: int32 [T]
    """
    starts = np.flatnonzero(np.isin(tokens, (USER, ASSISTANT))).tolist()
    return [
        {
            "role": _ROLES[int(tokens[start])],
            "content": "".join(map(chr, tokens[start + 1 : end].tolist())),
        }
        for start, end in pairwise(starts)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Describe where the model answers, and what the endpoint allows."""

    url: str
    """Such as https://api.openai.com/v1"""
    model: str
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key; without it none is sent."""
    temperature: float | None = None
    """None: the endpoint's own."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of each request; None removes one."""
    requests_per_minute: float = math.inf
    """Largest rate at which calls are made."""
    timeout_s: float = 300.0
    """Seconds after which one try of a call has failed."""
    patience_s: float = 600.0
    """Seconds without an answer to any call after which a failure ends the run."""

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.url):
            raise ConfigError(f"the endpoint must begin with http:// or https://, got {self.url!r}")

    @property
    def address(self) -> str:
        """The address of the chat completions."""
        base = self.url.rstrip("/")
        return base if base.endswith("/chat/completions") else f"{base}/chat/completions"


@dataclass(slots=True)
class Usage:
    """Count calls, their tokens and their time. An empty answer, after which the call was repeated,
    counts only for its tokens and the time.
    """

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the endpoint took from its cache."""
    completion_tokens: int = 0
    cut: int = 0
    """Answers that ended at the largest number of tokens."""
    empty: int = 0
    """Answers without text."""
    seconds: float = 0.0
    """Time until the answers were there, with repeated tries and pauses."""

    def add(self, other: "Usage") -> None:
        """Add the costs of other calls."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class _Part(msgspec.Struct):
    """Describe one part of an answer's content; only parts of type "text" are read."""

    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    """Describe the message of an answer, whose content is text or parts."""

    content: str | list[_Part] | None = None
    """Models that think may answer in parts, of which those of type "text" are the answer."""

    def text(self) -> str:
        """Return the text of the answer."""
        if not isinstance(self.content, list):
            return self.content or ""
        return "".join(part.text or "" for part in self.content if part.type == "text")


class _Choice(msgspec.Struct):
    """Describe one completion of an answer: its message, and why it ended."""

    message: _Message
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    """Hold the number of prompt tokens that the endpoint took from its cache; None if it does not
    say.
    """

    cached_tokens: int | None = None


class _Counted(msgspec.Struct):
    """Hold the numbers of tokens of a call, as far as the endpoint states them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(msgspec.Struct):
    """Describe the parts of a chat completion that are read; most of them may be null."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Counted | None = None
    model: str | None = None
    system_fingerprint: str | None = None


class _Retryable(Exception):
    """A call failed in a way that a repetition may cure."""

    def __init__(self, sentence: str, pause_s: float | None = None) -> None:
        super().__init__(sentence)
        self.pause_s = pause_s
        """Seconds to wait because the endpoint limits its rate; such a call does not count as a
        try. None: any other failure."""


class ChatEndpoint:
    """Sample completions at a chat endpoint, inside its `async with`; a `Sampler`, without weights.

    Args:
        say: called with lines for the user.
        served: name of the model that must answer, because it answered earlier calls of the same
            measurement; None: the name in the first answer. It may differ from the name that calls
            ask for, for example by a date.
    """

    def __init__(
        self, endpoint: Endpoint, say: Callable[[str], None], served: str | None = None
    ) -> None:
        self._endpoint, self._say, self.served = endpoint, say, served
        self.fingerprint: str | None = None
        """`system_fingerprint` of the latest answer, which names the endpoint's settings and
        hardware; None if it has none."""
        self._last: dict[str, Usage] = {}
        """Usage of each context's last call, until `usage` returns it."""
        self._resumes_at = self._next_at = 0.0
        """When the pause that the endpoint asked for ends, and when its rate allows a call."""
        self._answered_at = 0.0
        """When the last answer came, to any call; 0 before the first."""
        self._num_empty = self._num_limited = 0
        """Numbers of empty answers in a row, and of refusals for the rate since the last answer.
        Calls that were in flight together when one of them was refused count as one refusal."""
        self._limited_at = 0.0
        """When the last refusal came that counts in `_num_limited`."""
        self._reported: set[str] = set()
        """Kinds of the failures that were reported; each is reported once."""
        self._session: aiohttp.ClientSession

    async def complete(self, prompt: Prompt) -> Completion:
        """Request a completion. Cancellation abandons the call.

        Raises:
            ContextFull: the model's context does not hold the prompt.
            RunError: the endpoint refuses the work, has answered nothing for too long, or fails
                at this call again and again.
        """
        body = {
            "model": self._endpoint.model,
            "messages": messages_of(prompt.tokens),
            "max_tokens": prompt.sampling.max_tokens,
            "temperature": self._endpoint.temperature,
        } | dict(self._endpoint.request)
        sent = {key: value for key, value in body.items() if value is not None}
        began = time.monotonic()
        text, usage = await self._until_answered(sent)
        usage.seconds = time.monotonic() - began
        self._last[prompt.context] = usage
        return as_completion(text)

    def usage(self, context: str) -> Usage:
        """Return and forget the usage of the last call of a context."""
        return self._last.pop(context, Usage())

    async def _until_answered(self, body: Mapping[str, Any]) -> tuple[str, Usage]:
        """Repeat a call until it is answered; return the text of the answer, and the usage.

        The text is empty if it was so in `MAX_EMPTY_TRIES` tries.
        """
        # Failures of this call, those that followed an answer to another call, and empty answers.
        num_tries = num_while_others_answered = num_empty = 0
        spent = Usage()
        await self._wait_for_rate()
        began = failed_at = time.monotonic()
        while True:
            try:
                text, usage = await self._call(body)
            except _Retryable as fault:
                if fault.pause_s is None:
                    num_tries += 1
                    num_while_others_answered += self._answered_at > failed_at
                    failed_at = time.monotonic()
                if num_while_others_answered == MAX_TRIES:
                    raise RunError(
                        f"{self._endpoint.url} has failed {num_tries} times to answer one call, "
                        f"while it answered others: {fault}"
                    ) from None
                pause_s = fault.pause_s or _growing_pause(max(0, num_tries - 1))
                # Silence is counted from the last answer to any call, or from the beginning of this
                # call if that is later, because there may have been no call before.
                await self._rest(fault, pause_s, max(began, self._answered_at))
            else:
                self._answered_at, self._num_limited = time.monotonic(), 0
                if text or num_empty + 1 == MAX_EMPTY_TRIES:
                    spent.add(usage)
                    self._count_empty(text, spent)
                    return text, spent
                num_empty += 1
                # The endpoint charges for an empty answer too, for example for thinking.
                spent.add(replace(usage, calls=0, cut=0))
            await self._wait_for_rate()

    async def _wait_for_rate(self) -> None:
        """Wait until the endpoint's pause is over and its rate allows another call."""
        # While a call sleeps, the endpoint may ask for a pause, or another call may take the turn.
        # So the deadline may move, and is looked at again after each sleep. An event would not
        # shorten the wait.
        while (due := max(self._next_at, self._resumes_at)) > (now := time.monotonic()):  # noqa: ASYNC110
            await asyncio.sleep(due - now)
        self._next_at = now + 60.0 / self._endpoint.requests_per_minute

    async def _call(self, body: Mapping[str, Any]) -> tuple[str, Usage]:
        """Make one call.

        Raises:
            _Retryable: the call failed in a way that a repetition may cure.
            ContextFull: the prompt is too long.
            ConfigError: the URL of the endpoint is not an address.
            RunError: the call failed in another way.
        """
        limit, sent_at = self._endpoint.timeout_s, time.monotonic()
        try:
            async with (
                asyncio.timeout(limit),
                self._session.post(self._endpoint.address, json=body) as response,
            ):
                data = await response.read()
                return self._read(response, data, sent_at)
        except TimeoutError:
            raise _Retryable(f"no answer within {limit:g} s (--timeout)") from None
        except aiohttp.ClientPayloadError:
            raise _Retryable("the connection was cut in the middle of an answer") from None
        except aiohttp.InvalidURL:
            raise ConfigError(f"{self._endpoint.url!r} is no address") from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise RunError(
                f"{self._endpoint.url} has a certificate that is not trusted: "
                f"{error.certificate_error}; put the file with the certificate of its authority "
                "into SSL_CERT_FILE"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Retryable(f"no connection: {error or type(error).__name__}") from None

    def _read(
        self, response: aiohttp.ClientResponse, data: bytes, sent_at: float
    ) -> tuple[str, Usage]:
        """Return the text of a response, without the model's thinking, and its usage.

        Raises errors as `_call`.
        """
        if response.status != 200:
            self._refuse(response, sent_at, *_error_of(data))
        try:
            # `msgspec.json` would refuse half of a surrogate pair, which JSON may hold.
            answer = msgspec.convert(json.loads(data), _Answer)
        except (ValueError, msgspec.ValidationError) as error:
            body = " ".join(data.decode(errors="replace").split())
            raise _Retryable(
                f"an answer that is no chat completion: {error}: {body[:200] or 'nothing'!r}"
            ) from None
        self._check_served(answer.model or self._endpoint.model)
        self.fingerprint = answer.system_fingerprint
        choice, counted = answer.choices[0], answer.usage or _Counted()
        details = counted.prompt_tokens_details or _PromptDetails()
        usage = Usage(
            1,
            counted.prompt_tokens or 0,
            details.cached_tokens or 0,
            counted.completion_tokens or 0,
            choice.finish_reason == "length",
        )
        # Half of a surrogate pair cannot be written to the record as UTF-8.
        text = choice.message.text().encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return outside_thinking(text).strip(), usage

    def _refuse(
        self,
        response: aiohttp.ClientResponse,
        sent_at: float,
        reason: str,
        kinds: tuple[object, ...],
    ) -> NoReturn:
        """Raise the error of a response that holds no completion.

        Args:
            sent_at: when the request was sent.
            reason: message of the endpoint's error.
            kinds: type and code of the endpoint's error.
        """
        status = response.status
        is_spent = status == 429 and SPENT_QUOTA in kinds
        if (status in (408, 409, 425, 429) and not is_spent) or status >= 500:
            pause_s = _retry_after(response.headers.get("Retry-After"))
            # A call that was sent before the last refusal came belongs to the same burst: its
            # refusal does not show that the pause was too short, so it does not lengthen the pause.
            if status == 429 and sent_at >= self._limited_at:
                self._num_limited += 1
                self._limited_at = time.monotonic()
            if status == 429 and pause_s is None:
                pause_s = _growing_pause(max(0, self._num_limited - 1))
            raise _Retryable(f"HTTP {status}: {reason}", pause_s if status in (429, 503) else None)
        if status in (400, 413, 422) and (TOO_LONG in kinds or _FULL.search(reason)):
            raise ContextFull(f"{self._endpoint.model}: {reason}")
        advice = {
            400: "; change the request with --request",
            401: f"; put the key into {self._endpoint.key_variable}",
            403: f"; put the key into {self._endpoint.key_variable}",
            404: "; check the URL, which usually ends with /v1, and the model's name",
            429: "; the account's quota is spent, and no pause restores it: raise it, or put "
            f"the key of another account into {self._endpoint.key_variable}",
        }.get(status, "")
        # A redirected POST often becomes a GET, and loses the key where the host is another one.
        if response.history:
            advice = f"; it redirects to {response.url}: give --model that address"
        raise RunError(f"{self._endpoint.address} refused: HTTP {status}: {reason}{advice}")

    def _check_served(self, served: str) -> None:
        """Raise a RunError if another model has answered than before."""
        self.served = self.served or served
        if served != self.served:
            raise RunError(
                f"{self._endpoint.url} changed its model: {self.served!r} has answered so far, and "
                f"now {served!r}. A measurement of both models would be valid for neither: measure "
                "the new model with another --out, or continue when the old model answers again"
            )

    async def _rest(self, fault: _Retryable, pause_s: float, silent_since: float) -> None:
        """Report a failure, unless one of its kind was reported, and pause. Safe to cancel.

        Raises:
            RunError: nothing has come back for too long.
        """
        now, endpoint = time.monotonic(), self._endpoint
        silent = now - silent_since
        if silent + pause_s > endpoint.patience_s:
            asks = f"; it asks for a pause of {pause_s:.0f} s" if fault.pause_s else ""
            raise RunError(f"{endpoint.url} has not answered for {silent:.0f} s: {fault}{asks}")
        # The text after the colon is the endpoint's own, and may hold an id of the call.
        kind = str(fault).partition(":")[0]
        if kind not in self._reported:
            self._reported.add(kind)
            self._say(f"{endpoint.url}: {fault}; trying again in {pause_s:.3g} s")
        if fault.pause_s is not None:  # the endpoint asks all calls to wait
            self._resumes_at = max(self._resumes_at, now + pause_s)
        await asyncio.sleep(pause_s)

    def _count_empty(self, text: str, usage: Usage) -> None:
        """Count the calls in a row with empty answers; too many of them raise a RunError."""
        self._num_empty = 0 if text else self._num_empty + 1
        usage.empty = int(not text)
        if self._num_empty == MAX_EMPTY_CALLS:
            why = (
                "all tokens were spent before its first word, perhaps on thinking: raise "
                "--max-tokens"
                if usage.cut
                else "look at the endpoint's log"
            )
            raise RunError(
                f"{self._endpoint.url} returned no text in {MAX_EMPTY_CALLS} calls in a row; {why}"
            )

    async def __aenter__(self) -> Self:
        key = os.environ.get(self._endpoint.key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=0)  # the caller bounds the calls
        # Each call has a deadline of its own, in `_call`.
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._session.close()

    def release(self, context: str) -> None:
        """Forget the usage of a context; the endpoint itself keeps no context."""
        self._last.pop(context, None)

    async def describe(self) -> str:
        """Return the model and the address."""
        return f"{self._endpoint.model} at {self._endpoint.url}"


def as_completion(text: str) -> Completion:
    """Return a text as a completion of `text_chat`, with log-probs and versions of 0: an endpoint
    reports neither.
    """
    # A completion has at least one token: an empty answer is one space.
    tokens = np.array([ord(each) for each in text] or [ord(" ")], np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    return Completion(tokens, zeros, (VersionRun(0, 0, 0, provenance="reply"),), "stop", 0)


def _growing_pause(num_before: int) -> float:
    """Return the seconds of pause after a failure; `num_before` is the number of failures before it
    in a row.
    """
    # 2.0**1024 would overflow.
    return min(FIRST_PAUSE_S * 2.0 ** min(num_before, 100), MAX_PAUSE_S)


def _error_of(data: bytes) -> tuple[str, tuple[object, ...]]:
    """Return the message in the body of an error, cut to 300 characters, and the error's type and
    code if it has them.
    """
    text, kinds = data.decode(errors="replace"), tuple[object, ...]()
    try:
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        if isinstance(error, dict):
            text, kinds = error.get("message", text), (error.get("type"), error.get("code"))
        else:
            text = str(error)
    except ValueError:
        pass
    return " ".join(str(text).split())[:300] or "no reason given", kinds


def _retry_after(header: str | None) -> float | None:
    """Return the seconds of a `Retry-After`, which are a number or a date; None without one."""
    if header is None:
        return None
    try:
        return max(LEAST_PAUSE_S, float(header))
    except ValueError:
        pass
    try:
        return max(LEAST_PAUSE_S, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None
