"""Load the policy of a run: its model, and conversations with it."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any, Self

from mage_async.assembly import environment_of, trial_config_of
from mage_async.config import config_file
from mage_async.environments.agent import AgentTasks
from mage_async.environments.environment import Environment
from mage_async.environments.user_class import ResetStep
from mage_async.errors import MageError
from mage_async.inference.chat_files import load_chat
from mage_async.results.run_directory import RunDirectory
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.trial_run import TrialStart
from mage_services.actor.play_session import chosen_policy, drawn_task
from mage_services.api.coroutines import Background
from mage_services.engines.engine import make_engine
from mage_services.gateway.chat_completions import ChatRequest, Message
from mage_services.serving.chat_server import Conversations, ProgramServer


class Policy:
    """Hold a checkpoint of a run, or before the first one the initial policy; `Run.policy` returns
    one.

    Attributes:
        config: The configuration that the run recorded, with `assignments`, texts such as
            "engine.max_tokens=4096", written over it.
        path: HuggingFace folder of the model, with its tokenizer and chat template.
        version: Number of steps that the model was trained for.

    Raises:
        RunError: the directory is no run, or the run has no policy yet.
        ConfigError: an assignment is wrong.
    """

    def __init__(
        self, run: RunDirectory, assignments: Sequence[str] = (), checkpoint: str = "newest"
    ) -> None:
        run.check_policy()
        self.config = config_file.load_recorded(run.config, assignments, imports=False)
        self.path, self.version = chosen_policy(run, self.config, checkpoint)

    def __repr__(self) -> str:
        return f"<mage policy {self.path}: {self.version} steps>"

    def model(self) -> Any:
        """Return the model as `transformers` loads it: a causal LM."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, local_files_only=True)

    def tokenizer(self) -> Any:
        """Return the tokenizer as `transformers` loads it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path, local_files_only=True)

    def chat(self) -> "Chat":
        """Return a conversation, with an engine of its own in another thread."""
        return Chat(self)

    @cached_property
    def environment(self) -> Environment | None:
        """The run's environment; None if it cannot be made any more: a conversation does not need
        it.
        """
        try:
            return environment_of(self.config)
        except MageError as fault:
            text = f"answers are not restricted to legal actions: {fault}"
            print(text, file=sys.stderr, flush=True)
            return None

    def _chat(self) -> ChatFormat:
        """Return the policy's chat format."""
        return load_chat(self.path, thinking=self.config.transcript.thinking)

    @asynccontextmanager
    async def programs(
        self, environment: AgentTasks, name: str, most: int
    ) -> AsyncIterator[ProgramServer]:
        """Run the policy's engine, and yield a server of programs like those of training.

        Args:
            name: Name of the engine, for errors.
            most: Largest number of conversations that are remembered.
        """
        chat = self._chat()
        environment.facts = replace(environment.facts, max_turns=sys.maxsize)  # calls have no end
        config = trial_config_of(self.config, environment, chat, 1)
        start = TrialStart(environment, drawn_task(environment, None, None), 0, config, chat, name)
        async with make_engine(self.config, self.path, name) as engine:
            yield ProgramServer(start, engine, most)

    @asynccontextmanager
    async def conversations(self, name: str, most: int = 64) -> AsyncIterator[Conversations]:
        """Run the policy's engine, and yield the conversations with it.

        Args:
            name: Name of the engine, for errors.
            most: Largest number of conversations that are remembered.
        """
        chat, environment = self._chat(), self.environment
        actions, without_tags = None, False
        if environment is not None:
            chat = chat.offering(environment.tools)
            without_tags = isinstance(environment, AgentTasks) or bool(environment.tools)
        if isinstance(environment, ResetStep):
            actions = environment.actions_of_every_turn
        async with make_engine(self.config, self.path, name) as engine:
            yield Conversations(self.config, chat, engine, most, actions, without_tags=without_tags)


class Chat:
    """Hold a conversation with a policy; call the object with the user's message.

    Use it as a context manager to end the engine; otherwise the engine ends with the program.
    """

    def __init__(self, policy: Policy) -> None:
        self._background = Background(lambda: policy.conversations("chat")).__enter__()
        self._sessions = count()
        self.reset()

    def __call__(
        self,
        words: str,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        regex: str | None = None,
    ) -> str:
        """Return the policy's answer, sampled like an action of training where an argument is None.

        Args:
            words: The user's next message.
            temperature: Temperature of sampling; 0 chooses the most likely tokens.
            top_p: Nucleus sampling, above 0 and at most 1.
            max_tokens: Largest number of tokens; where legal actions restrict an answer, this asks
                for any text instead.
            seed: Seed of sampling; None for a random one.
            regex: Regular expression that the answer's action matches.

        Raises:
            MageError: a value is out of its range (`BadRequest`), or the conversation
                has outgrown the engine's context (`ContextFull`): `reset` it.
            RuntimeError: the conversation is closed.
        """
        request = ChatRequest(
            [Message("user", words)],
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            seed=seed,
            regex=regex,
        )
        work = self._background.value.answer(request, self._session)
        return str(self._background.run(work).text)

    def reset(self) -> None:
        """Begin another conversation."""
        self._session = f"session {next(self._sessions)}"

    def close(self) -> None:
        """End the engine; a second call has no effect."""
        self._background.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
