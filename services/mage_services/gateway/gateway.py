"""Serve the policy to programs over HTTP, by one server in each process that plays trials.

path                          protocol
/KEY/v1/chat/completions      OpenAI's chat completions
/KEY/v1/responses             OpenAI's responses
/KEY/v1/messages              Anthropic's messages
/KEY/v1/models                OpenAI's list of models: one, the policy

KEY is the key of one episode of one trial. A client that also sends it as its `api_key` may use the
paths without it.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from aiohttp import web

from mage_async.completion import Completion
from mage_async.environments.agent import Session
from mage_async.errors import (
    CallFault,
    ContextFull,
    EnvironmentFault,
    InfrastructureFault,
    PolicyError,
    TrialFault,
)
from mage_async.trials.agent_run import AgentRun, Choice, Message, Pending, PolicyCall
from mage_services.engines.chat_endpoint import TOO_LONG
from mage_services.engines.engine import Sampler, complete_in_time
from mage_services.gateway.anthropic_messages import (
    MessagesRequest,
    anthropic_error,
    messages_response,
)
from mage_services.gateway.chat_completions import (
    BadRequest,
    ChatRequest,
    completion_response,
    decode,
    error_response,
    in_order_of_calls,
)
from mage_services.gateway.openai_responses import ResponsesRequest, responses_response

MAX_REQUEST_BYTES = 2**24
"""Largest number of bytes of a request's body."""
MAX_AT_ONCE = 64
"""Largest number of calls of one trial that wait at the same time."""
PREFIX = "mage-"
"""Beginning of every key of an episode. A client whose `api_key` begins otherwise was not given one
by this program."""
POLICY = "policy"
"""Name of the model in every answer, whichever name a client asks for."""


class Refused(Exception):
    """A request that is answered with an error; its message is sent to the client.

    Args:
        status: HTTP status of the answer.
        code: `code` of the error in OpenAI's protocol; None: it has none.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class EpisodeEndpoint:
    """Answer the calls of a program in one episode of a trial; each episode has a key of its own.

    Args:
        run: the trial.
        engine: samples the answers.
        session: address and key of the episode.
        fail: ends the trial with a fault.
    """

    def __init__(
        self, run: AgentRun, engine: Sampler, session: Session, fail: Callable[[TrialFault], None]
    ) -> None:
        self.session = session
        self.conversations: dict[str, tuple[Message, ...]] = {}
        """Conversation up to and including each answer to a request of `/responses`, by the id of
        the answer, so that a later request can continue it."""
        self._run, self._engine, self._fail = run, engine, fail
        self._waiting: set[asyncio.Task[list[Choice]]] = set()
        """Calls that are being answered."""
        self.is_closed = False
        """Whether the episode has ended."""

    @property
    def is_waiting(self) -> bool:
        """Whether a call is being answered."""
        return bool(self._waiting)

    async def answer(self, policy_call: PolicyCall) -> list[Choice]:
        """Sample the choices of a call. Cancellation forgets the call.

        Raises:
            BadRequest: the result of a tool answers no call; see `in_order_of_calls`.
            Refused: the call cannot be answered, or the episode ended before.
        """
        policy_call = replace(policy_call, messages=in_order_of_calls(policy_call.messages))
        if len(self._waiting) >= MAX_AT_ONCE:
            fault = CallFault(f"{self._run.place()} made over {MAX_AT_ONCE} calls at once")
            self._fail(fault)
            raise Refused(429, str(fault))
        task = asyncio.create_task(self._sample(policy_call), name="call of a program")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        try:
            with self.session.waiting():
                # Unlike `await task`, this does not raise when `close` cancels the task.
                await asyncio.wait([task])
        finally:
            task.cancel()
        if task.cancelled():
            raise Refused(410, "this episode is over")
        return task.result()

    def close(self) -> None:
        """End the episode: calls that wait are refused, and leave nothing in the trial."""
        self.is_closed = True
        for task in self._waiting:
            task.cancel()

    async def _sample(self, policy_call: PolicyCall) -> list[Choice]:
        """Sample the choices of a call. If its context is full, first sample the notes by which the
        context is replaced (`trial.compaction`).

        Raises errors as `answer`.
        """
        # A request may begin during the episode, and its body arrive after the end.
        if self.is_closed or not self._run.is_playing:
            raise Refused(410, "this episode is over")
        try:
            while (notes := self._run.notes_due(policy_call)) is not None:
                (written,) = await self._draw([notes])
                self._run.take_notes(notes, written)
            pending = self._run.prompts_of(policy_call)
        except CallFault as fault:
            self._fail(fault)
            raise Refused(429, str(fault)) from fault
        except (EnvironmentFault, PolicyError) as fault:
            raise Refused(400, str(fault)) from fault
        except ContextFull as fault:
            raise self._full(fault) from fault
        completions = await self._draw(pending)
        return [self._run.take(*each) for each in zip(pending, completions, strict=True)]

    async def _draw(self, pending: Sequence[Pending]) -> list[Completion]:
        """Sample the completions of a call, or of the notes before it.

        Raises:
            Refused: the completions cannot be sampled, or the episode ended before.
        """
        making = [
            asyncio.create_task(complete_in_time(each.prompt, self._engine)) for each in pending
        ]
        completions: list[Completion] = []
        try:
            completions = await asyncio.gather(*making)
        except ContextFull as fault:
            raise self._full(fault) from fault
        except InfrastructureFault as fault:
            self._fail(fault)
            raise Refused(503, str(fault)) from fault
        finally:
            if not completions:
                for each, task in zip(pending, making, strict=True):
                    task.cancel()
                    self._run.give_up(each)
        if not self._run.is_current(pending[0]):
            raise Refused(410, "this episode is over")
        return completions

    def _full(self, fault: ContextFull) -> Refused:
        """Note that a conversation has outgrown its context; return the error for the client."""
        self.session.length_error = str(fault)
        return Refused(400, str(fault), TOO_LONG)


class Gateway:
    """Answer the calls of programs on a free port of this machine; it listens from the first
    trial on.
    """

    def __init__(self) -> None:
        self._endpoints: dict[str, EpisodeEndpoint] = {}
        """Endpoints of the episodes of the trials that are being played, by key."""
        self._address = ""
        self._starting = asyncio.Lock()
        self.application = application = web.Application(client_max_size=MAX_REQUEST_BYTES)
        for prefix in ("/v1", "/{key}/v1"):
            application.add_routes(
                [
                    web.post(f"{prefix}/chat/completions", partial(self._reply, self._chat)),
                    web.post(f"{prefix}/responses", partial(self._reply, self._responses)),
                    web.get(f"{prefix}/models", self._models),
                    # Anthropic's client adds `/v1` to its base URL itself.
                    web.post(f"{prefix}/messages", partial(self._reply, self._messages)),
                    web.post(f"{prefix}/v1/messages", partial(self._reply, self._messages)),
                ]
            )
        application.router.add_route("*", "/{path:.*}", self._refuse_path)
        # A call whose client has gone away is cancelled: nobody will read its answer.
        self._runner = web.AppRunner(
            application, handler_cancellation=True, shutdown_timeout=0.1, access_log=None
        )

    async def close(self) -> None:
        """Stop listening."""
        if self._address:
            await self._runner.cleanup()

    @asynccontextmanager
    async def serving(self, run: AgentRun, engine: Sampler) -> AsyncIterator[None]:
        """Context manager: answer the calls of a trial's program.

        Raises:
            TrialFault: a call has failed the trial; the block was cancelled.
        """
        await self._listen()
        endpoints: list[EpisodeEndpoint] = []
        faults: list[TrialFault] = []
        try:
            # A timeout without a limit: `fail`, which runs in the task of a call, lets it expire
            # and so cancels this block, which runs in another task.
            async with asyncio.timeout(None) as limit:

                def fail(fault: TrialFault) -> None:
                    """End the trial: cancel the block below."""
                    faults.append(fault)
                    if not limit.expired():
                        limit.reschedule(asyncio.get_running_loop().time())

                def open_session() -> Session:
                    """Begin an episode: calls of the previous episode's program are refused from
                    now on."""
                    for endpoint in endpoints:
                        endpoint.close()
                    key = PREFIX + secrets.token_hex(12)
                    session = Session(f"{self._address}/{key}/v1", key)
                    endpoints.append(EpisodeEndpoint(run, engine, session, fail))
                    self._endpoints[key] = endpoints[-1]
                    return session

                run.connect(open_session)
                yield
        except (TimeoutError, CallFault) as error:
            # The program may fail in its own way after a call was refused: the first fault counts.
            if not faults:
                raise
            raise faults[0] from error
        else:
            if faults:
                raise faults[0]
        finally:
            for endpoint in endpoints:
                endpoint.close()
                del self._endpoints[endpoint.session.api_key]

    async def _listen(self) -> None:
        """Listen on a free port, unless this server does so already."""
        async with self._starting:
            if not self._address:
                await self._runner.setup()
                await web.TCPSite(self._runner, "127.0.0.1", 0).start()
                host, port = self._runner.addresses[0]
                self._address = f"http://{host}:{port}"

    async def _reply(
        self,
        handle: Callable[[EpisodeEndpoint, bytes], Awaitable[web.Response]],
        request: web.Request,
    ) -> web.Response:
        """Answer a request, or return the reason for a refusal, in the request's protocol."""
        code, endpoint = None, None
        try:
            # First, because the endpoint may be closed or forgotten while a slow body arrives.
            body = await request.read()
            endpoint = self._endpoint_of(request)
            return await handle(endpoint, body)
        except Refused as error:
            status, code, why = error.status, error.code, str(error)
        except BadRequest as error:
            status, why = 400, str(error)
        except web.HTTPRequestEntityTooLarge as error:
            status, why = 413, str(error.text)
        except RecursionError:  # the request could be decoded, but a part of it not encoded again
            status, why = 400, "the request is nested too deeply"
        if endpoint is not None and status == 400 and code is None:
            endpoint.session.call_note = "its latest call of the policy was refused with status 400"
        if request.path.endswith("/messages"):
            return anthropic_error(status, why)
        return error_response(status, why, code)

    def _endpoint_of(self, request: web.Request) -> EpisodeEndpoint:
        """Return the endpoint of the episode that a request belongs to.

        Raises:
            Refused: the key is unknown, or those in the path and in the header differ.
        """
        in_path = request.match_info.get("key")
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        given = request.headers.get("x-api-key", "") or bearer
        if in_path is not None and given.startswith(PREFIX) and given != in_path:
            raise Refused(403, "`base_url` and `api_key` are those of different episodes")
        key = given if in_path is None else in_path
        endpoint = self._endpoints.get(key)
        if endpoint is None and not key.startswith(PREFIX):
            raise Refused(401, "pass the `api_key` of the episode to your client")
        if endpoint is None or endpoint.is_closed:
            raise Refused(410, "this episode is over")
        return endpoint

    async def _chat(self, endpoint: EpisodeEndpoint, body: bytes) -> web.Response:
        """Answer a request of OpenAI's chat completions."""
        request: ChatRequest = decode(body, ChatRequest)
        choices = await endpoint.answer(request.policy_call())
        return completion_response(choices, POLICY, request)

    async def _messages(self, endpoint: EpisodeEndpoint, body: bytes) -> web.Response:
        """Answer a request of Anthropic's messages."""
        request: MessagesRequest = decode(body, MessagesRequest)
        (choice,) = await endpoint.answer(request.policy_call())
        return messages_response(choice, POLICY, is_streamed=request.stream)

    async def _responses(self, endpoint: EpisodeEndpoint, body: bytes) -> web.Response:
        """Answer a request of OpenAI's responses, which may continue an earlier response."""
        request: ResponsesRequest = decode(body, ResponsesRequest)
        before: tuple[Message, ...] = ()
        if request.previous_response_id is not None:
            if request.previous_response_id not in endpoint.conversations:
                raise BadRequest("`previous_response_id` names no response that is remembered")
            before = endpoint.conversations[request.previous_response_id]
        policy_call = request.policy_call(before)
        (choice,) = await endpoint.answer(policy_call)
        identity = f"resp_{secrets.token_hex(8)}"
        call_ids = tuple(f"call_{secrets.token_hex(8)}" for _ in choice.calls)
        answer = Message("assistant", choice.text, choice.calls, call_ids)
        # As in OpenAI's API, the items of a conversation are kept, and `instructions` are not.
        items = policy_call.messages[1:] if request.instructions else policy_call.messages
        endpoint.conversations[identity] = (*items, answer)
        return responses_response(choice, request, identity, call_ids, POLICY)

    async def _refuse_path(self, request: web.Request) -> web.Response:
        """Answer a request for anything else, in the form that clients read."""
        # The path may have the key in it, so it is not repeated.
        text = (
            "no such path: the policy answers POST of /chat/completions, /responses and /messages, "
            "and GET of /models, each below `base_url`"
        )
        return error_response(404, text)

    async def _models(self, request: web.Request) -> web.Response:
        """List the models: one, the policy."""
        model = {"id": POLICY, "object": "model", "created": 0, "owned_by": "mage"}
        return web.json_response({"object": "list", "data": [model]})
