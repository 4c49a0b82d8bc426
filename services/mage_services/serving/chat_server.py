"""Serve one policy over OpenAI's chat completions API; `mage serve` runs this server.

A policy that agent programs were trained with is served by `ProgramServer`, as the gateway of their
trials does; every other one by `ChatServer`, as follows.

The tokens of a conversation are one context of the policy's engine, to which each request appends,
as in the trials of training. A client refers to its conversation by the name of a session, or sends
all messages with every request. In the second case the server looks for the context with the same
messages, so that sampled tokens are kept and not encoded again from their text.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
from aiohttp import web

from mage_async.assembly import sampling_of
from mage_async.completion import Prompt, Sampling
from mage_async.config.schema import Config
from mage_async.environments.agent import Session
from mage_async.errors import ContextFull, EnvironmentFault, InfrastructureFault, RunError
from mage_async.methods.method import Methods
from mage_async.restriction import Restriction
from mage_async.trajectory import Kind
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.agent_run import MAX_LINEAGES, AgentRun, Choice, text_form
from mage_async.trials.allowed_tokens import actions_restriction, answer_restriction
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.trial_run import TrialStart
from mage_services.engines.chat_endpoint import TOO_LONG
from mage_services.engines.engine import Engine, Sampler
from mage_services.gateway.chat_completions import (
    BadRequest,
    ChatRequest,
    Message,
    completion_response,
    decode,
    error_response,
    in_order_of_calls,
    read_request,
)
from mage_services.gateway.gateway import (
    MAX_REQUEST_BYTES,
    POLICY,
    EpisodeEndpoint,
    Gateway,
    Refused,
)
from mage_services.serving.session import refuse_other_sites

Texts = tuple[str | tuple[str, ...], ...]
"""Texts of a conversation's messages: the user's first one, then alternately the policy's and the
user's. Answers of tools, which come in place of a user's message, are a tuple.
"""


@dataclass(slots=True)
class _Context:
    """Hold a context of the engine, and the messages that it contains."""

    name: str
    """Name of the context in the engine."""
    tokens: list[int] = field(default_factory=list)
    """All tokens of the context, of prompts and completions."""
    texts: Texts = ()
    """Texts of the messages so far; the last one is the policy's."""
    forced: str = ""
    """Closing tag that the server adds to the policy's last message; "" if the policy sampled it.
    It is not among `tokens` yet."""


class SessionBusy(Exception):
    """A session has an earlier request that is not answered yet. The same request can be answered
    later: status 409, after which clients of OpenAI send it again.
    """


class Conversations:
    """Hold all conversations with one policy.

    Args:
        most: Number of conversations to remember; beyond it, the least recently used is forgotten.
        actions: Legal actions of every turn, or a pattern of them. As in training, an answer is one
            of them, unless the request limits its tokens or has a form. None: an answer may be any
            text, unless the request has a form.
        without_tags: Whether an answer has no tags around its action, because the policy was
            trained by an agent program or calls tools.

    Raises:
        RunError: the policy has two roles, and a conversation could use only one of them.
    """

    def __init__(
        self,
        config: Config,
        chat: ChatFormat,
        engine: Engine,
        most: int = 64,
        actions: tuple[str, ...] | str | None = None,
        *,
        without_tags: bool = False,
    ) -> None:
        if Methods(config).roles() is not None:
            raise RunError("the policy has two roles, of which a conversation has only one")
        self._chat, self._engine, self._most = chat, engine, most
        self._default_sampling = sampling_of(config, chat)
        self._parser = ActionParser(config.transcript.forced_tags, has_tools=without_tags)
        # Where the policy writes the opening tag, trials are not restricted (`restriction_of`).
        is_restricted = config.sampling.restricted and bool(self._parser.prefill(Kind.ACT))
        self._actions = actions if is_restricted else None
        self.needs_regex = is_restricted and actions is None
        """Whether the turns of training had legal actions that this server does not know, so that
        a request has to send them."""
        self._kept: OrderedDict[str | Texts, _Context] = OrderedDict()
        """Contexts by the name of their session or, without a session, by their messages; the least
        recently used is first."""
        self._busy: set[str] = set()
        """Names of sessions whose completion is being sampled."""
        self._ids, self._seeds = count(), random.SystemRandom()

    async def answer(self, request: ChatRequest, session: str = "") -> Choice:
        """Sample the policy's next message.

        Args:
            session: Name of the conversation. With a name, the request may hold only the new
                message, or the new answers of tools; several messages that do not continue the
                conversation replace it. With "" the request must hold all messages.

        Raises:
            BadRequest: the messages are no conversation, or the form of the answer cannot be used.
            SessionBusy: an earlier request of the session has not been answered yet.
            ContextFull: the conversation has outgrown the engine's context.
            InfrastructureFault: the engine has lost the completion.
        """
        texts = conversation_texts(request.messages, has_tools=self._chat.has_tools)
        if session and session in self._busy:
            raise SessionBusy(f"session {session!r:.60} still waits for an answer")
        # The context is removed until its completion has come. Another request with the same
        # messages then finds none, and gets a context of its own.
        context = self._kept.pop(session or texts[:-1], None) or _Context(f"c{next(self._ids)}")
        # A request with all messages repeats those of the context; one with only the new message
        # does not.
        known = len(context.texts)
        continues = texts[:known] == context.texts
        is_only_new = len(request.messages) == 1 or (
            len(texts) == 1 and isinstance(texts[0], tuple)
        )
        if not continues and not is_only_new:  # the client has edited earlier messages
            self._engine.release(context.name)
            context = _Context(f"c{next(self._ids)}")
        new = texts[known:] if continues else texts
        self._busy.add(session)
        try:
            return await self._continue(context, new, request)
        finally:
            self._busy.discard(session)
            self._keep(session or context.texts, context)

    def forget(self, key: str | Texts) -> None:
        """Forget a session, or the conversation with these messages; does nothing if there is
        none.
        """
        if (context := self._kept.pop(key, None)) is not None:
            self._engine.release(context.name)

    async def _continue(self, context: _Context, new: Texts, request: ChatRequest) -> Choice:
        """Append messages to a context, sample the policy's answer, and append the answer too.

        Args:
            new: Texts that the context does not have yet; the first and the last are the user's.
        """
        # The server writes this beginning of each of the policy's messages, an opening tag or "".
        prefill = self._parser.prefill(Kind.ACT)
        tokens, forced = [*context.tokens], context.forced
        # `new` begins with the user, because a context ends with the policy: odd numbers are the
        # policy's.
        for number, words in enumerate(new):
            if isinstance(words, tuple):
                if tokens:
                    tokens += self._chat.tool_answers(tokens[-1], words)
                    continue
                words = "\n\n".join(words)  # a first message has no call before it
            if number % 2:
                # A message of the policy that this context did not sample, so it must be encoded.
                # Its prefill is in `tokens` already. A closing tag that the server would have added
                # is left out here, because `self._chat.answer` encodes it before the next user
                # message.
                body = words.removeprefix(prefill)
                forced = self._parser.closing(Kind.ACT, "")
                closed = bool(forced) and body.endswith(forced)
                body, forced = (body.removesuffix(forced), forced) if closed else (body, "")
                tokens += self._chat.encode_data(body)
            elif tokens:
                tokens += self._chat.answer(tokens[-1], forced, words, prefill)
            else:
                tokens += self._chat.opening(words, prefill)
        sampling, seed = sampling_for(request, self._default_sampling), self._seed(request)
        restriction = self._restriction(request, sampling.max_tokens)
        prompt = Prompt(
            context.name, np.array(tokens, np.int32), sampling, seed, restriction=restriction
        )
        completion = await self._engine.complete(prompt)
        sampled = completion.tokens.tolist()
        context.forced = self._parser.closing(Kind.ACT, self._chat.decode(sampled))
        context.tokens = tokens + sampled
        # The token that ended the completion stays in the context, and is not shown.
        text = prefill + self._chat.decode_completion(sampled) + context.forced
        context.texts += (*new, text)
        # An action may end at training's limit of tokens, so it counts as finished there. At a
        # limit of the request the answer counts as cut ("length").
        is_action = bool(context.forced) and request.limit() is None
        finish = "stop" if is_action else completion.finish
        return Choice(
            text,
            calls=(),
            finish=finish,
            stop=None,
            num_prompt_tokens=len(tokens),
            num_reused=completion.num_reused,
            tokens=tuple(self._chat.decode([token]) for token in sampled),
            logprobs=tuple(completion.logprobs.tolist()),
        )

    def _restriction(self, request: ChatRequest, max_tokens: int) -> Restriction | None:
        """Return the form of the answer: that of the request, or one of the legal actions; None if
        it may be any text.

        Args:
            max_tokens: Largest number of tokens of an answer without tags.

        Raises:
            BadRequest: the request's form cannot be used.
        """
        if not request.has_form():
            if self._actions is None or request.limit() is not None:
                return None
            return actions_restriction(self._actions, self._chat, self._parser)
        call = request.policy_call()
        try:
            if self._parser.has_tools and (form := text_form(call)) is not None:
                return answer_restriction(form, self._chat, max_tokens)
            if call.pattern is not None:
                return actions_restriction(call.pattern, self._chat, self._parser)
        except EnvironmentFault as fault:
            raise BadRequest(f"the form of the answer: {fault}") from fault
        raise BadRequest(
            "`response_format` cannot restrict an answer of this policy to JSON, because it is one "
            "action: send a `regex` that the action matches"
        )

    def _keep(self, key: str | Texts, context: _Context) -> None:
        """Remember a context, and forget the least recently used ones."""
        if not context.texts:  # its first request has failed
            self._engine.release(context.name)
            return
        # Two equal requests without a session that got equal answers have the same key.
        self.forget(key)
        self._kept[key] = context
        while len(self._kept) > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._engine.release(oldest.name)

    def _seed(self, request: ChatRequest) -> int:
        """Return the seed of a request, or a random one."""
        return self._seeds.getrandbits(63) if request.seed is None else abs(request.seed) % 2**63


def sampling_for(request: ChatRequest, default: Sampling) -> Sampling:
    """Return the sampling of training, with the values of a request in place of its own.

    Raises:
        BadRequest: a value is out of its range.
    """
    requested: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_tokens": request.limit(),
    }
    given = {name: value for name, value in requested.items() if value is not None}
    sampling = replace(default, **given)
    has_temperature = 0 <= sampling.temperature < float("inf")
    if not has_temperature or not 0 < sampling.top_p <= 1 or sampling.max_tokens < 1:
        raise BadRequest(
            "`temperature` must be a number from 0, `top_p` above 0 and at most 1, "
            f"`max_tokens` at least 1; got {sampling.temperature:g}, {sampling.top_p:g}, "
            f"{sampling.max_tokens}"
        )
    return sampling


def conversation_texts(messages: Sequence[Message], *, has_tools: bool = False) -> Texts:
    """Return the texts of a conversation's messages, alternately the user's and the policy's.

    Any role but "assistant" counts as the user. Consecutive messages of one side are joined, so the
    system's message becomes the beginning of the user's first one. Results of parallel calls come
    in the order of the calls, as in training.

    Args:
        has_tools: Whether answers of tools become a tuple, unless they follow a user's message.

    Raises:
        BadRequest: there are no messages, or the first or the last one is not the user's.
    """
    texts, last = list[str | tuple[str, ...]](), ""
    # The server writes the policy's calls as text, without ids, and in a session a client may send
    # the results alone. So the calls may be unknown; their results stay in the order as sent.
    read = (message.read() for message in messages)
    for message in in_order_of_calls(read, are_all_sent=False):
        side = "assistant" if message.role == "assistant" else "user"
        is_answer = has_tools and message.role == "tool"
        # A client that has read the policy's calls out of their text may send the calls alone.
        content = message.content or message.as_chat()["content"]
        if not texts and side == "assistant":
            raise BadRequest("`messages` must begin with one of the user's or the system's")
        if side != last:
            texts.append((content,) if is_answer else content)
        elif is_answer and isinstance(before := texts[-1], tuple):
            texts[-1] = (*before, content)
        else:
            before = texts[-1]
            joined = before if isinstance(before, str) else "\n\n".join(before)
            texts[-1] = f"{joined}\n\n{content}"
        last = side
    if last != "user":
        raise BadRequest("`messages` must end with one of the user's")
    return tuple(texts)


SESSION = "X-Session-Id"
"""HTTP header with the name of a conversation that the server remembers."""


class ChatServer:
    """Answer requests for completions over HTTP; `serve` runs the `application`.

    Args:
        model: Name of the model that clients see.
    """

    def __init__(self, conversations: Conversations, model: str) -> None:
        self._conversations, self._model = conversations, model
        self.application = web.Application(client_max_size=MAX_REQUEST_BYTES)
        self.application.add_routes(
            [
                web.post("/v1/chat/completions", self._complete),
                web.get("/v1/models", self._list_models),
                web.route("*", "/{path:.*}", self._refuse_path),
            ]
        )

    async def _complete(self, request: web.Request) -> web.Response:
        """Answer a request for a completion."""
        refuse_other_sites(request)
        try:
            chat_request = read_request(await request.read())
            session = request.headers.get(SESSION, "")
            answer = await self._conversations.answer(chat_request, session)
        except BadRequest as error:
            return error_response(400, str(error))
        except ContextFull as error:
            return error_response(400, str(error), TOO_LONG)
        except SessionBusy as error:
            return error_response(409, str(error))
        except web.HTTPRequestEntityTooLarge as error:
            return error_response(413, str(error.text))
        except InfrastructureFault as fault:
            return error_response(503, str(fault))
        return completion_response([answer], self._model, chat_request)

    async def _refuse_path(self, request: web.Request) -> web.Response:
        """Answer a request for anything else, in the form that clients read."""
        text = "this server answers POST /v1/chat/completions and GET /v1/models"
        return error_response(404, f"{request.method} {request.path:.60}: {text}")

    async def _list_models(self, request: web.Request) -> web.Response:
        """Answer with the list of models, which has one."""
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "mage"}
        return web.json_response({"object": "list", "data": [model]})


class ProgramServer(Gateway):
    """Answer programs as the gateway of their trials does, over the same protocols and with tools,
    but without keys.

    All conversations belong to one `AgentRun`, which continues the tokens of those that it knows.
    Once it holds more than `most`, a new one takes its place, which reads old conversations anew.

    Args:
        start: An episode of a program, which never ends.
    """

    def __init__(self, start: TrialStart, engine: Sampler, most: int) -> None:
        super().__init__()
        self._start, self._engine, self._most = start, engine, min(most, MAX_LINEAGES // 2)
        self._runs: list[tuple[AgentRun, EpisodeEndpoint]] = []
        """The current run, and before it those that still had calls to answer."""
        self._numbers = count()

    def _endpoint_of(self, request: web.Request) -> EpisodeEndpoint:
        """Return the endpoint of all clients.

        Raises:
            Refused: the client expects the server to keep its conversation.
        """
        refuse_other_sites(request)
        if SESSION in request.headers:
            raise Refused(400, f"a program sends its whole conversation: leave {SESSION} out")
        if not self._runs or len(self._runs[-1][0].contexts()) > self._most:
            self._begin()
        return self._runs[-1][1]

    def _begin(self) -> None:
        """Begin a run, and forget those before it that have answered all calls."""
        for run, endpoint in [*self._runs]:
            if not endpoint.is_waiting:
                self._runs.remove((run, endpoint))
                for context in run.contexts():
                    self._engine.release(context)
        # The number is also the trial's index, on which the seeds of its completions depend:
        # otherwise each run would sample what the first one did.
        number = next(self._numbers)
        run = AgentRun(replace(self._start, index=number, name=f"{self._start.name}{number}"))
        session = Session("", "")
        run.connect(lambda: session)
        run.next_call()  # begins the episode; the call itself would run a program
        # A fault is answered to the client, and ends nothing else.
        self._runs.append((run, EpisodeEndpoint(run, self._engine, session, lambda fault: None)))

    async def _chat(self, endpoint: EpisodeEndpoint, body: bytes) -> web.Response:
        """Answer a request of OpenAI's chat completions, sampled as it says."""
        request: ChatRequest = decode(body, ChatRequest)
        if request.seed is not None:
            raise BadRequest("`seed` has no effect on this policy: leave it out")
        sampling = sampling_for(request, self._start.config.sampling)
        choices = await endpoint.answer(replace(request.policy_call(), sampling=sampling))
        return completion_response(choices, POLICY, request)
