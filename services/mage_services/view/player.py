"""Let a person play a trial in the browser, and then the agent the same task, for `mage view`.

This is a process of its own, with an engine of its own. The web server sends it a `PlayRequest`,
and then an `Answer` to each of its `Choices`. The process sends texts to show, and at the end a
`TrialEnd` or a `Fault`.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from mage_async.errors import MageError
from mage_async.pages.turns import shown_trial
from mage_async.results.run_directory import RunDirectory
from mage_async.trials.human_play import HumanPrompt, shown
from mage_services.processes.child_process import BlockingChannel, channel_to_parent
from mage_services.processes.process import first_failure

MODULE = "mage_services.view.player"
"""This module, which the process runs."""


class PlayRequest(msgspec.Struct, frozen=True, tag=True):
    """Request that the process plays a trial."""

    run: str
    """The run's directory."""
    member: str
    """Name of the task's hidden variant, such as an opponent; "" for any held-out one."""
    seed: int | None
    has_person: bool
    """Whether a person plays before the agent."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Carry the person's action."""

    text: str


class Text(msgspec.Struct, frozen=True, tag=True):
    """Carry a text for the person."""

    text: str


class Choices(msgspec.Struct, frozen=True, tag=True):
    """Request an action of the person."""

    choices: tuple[str, ...]
    """Legal actions; empty if any text is legal."""
    in_words: str
    """The legal actions as one line of text."""


class TrialEnd(msgspec.Struct, frozen=True, tag=True):
    """Carry the agent's trial, and the person's rewards."""

    trial: dict[str, Any]
    """The agent's trial, a `ShownTrial` as plain data."""
    member: str
    """Name of the task's hidden variant, which the page may show now."""
    version: int
    """Version of the agent's policy."""
    rewards: list[float]
    """The person's reward of each episode."""


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Carry the reason that the trial cannot be played."""

    reason: str


FromServer = PlayRequest | Answer
FromPlayer = Text | Choices | TrialEnd | Fault
Server = BlockingChannel[FromServer]
"""The channel to the server."""


def main() -> None:
    """Play one trial, first by the person and then by the agent."""
    server = channel_to_parent(FromServer)
    request = server.receive()
    if not isinstance(request, PlayRequest):  # the server has ended
        return
    try:
        _play(server, request)
    except* MageError as group:
        server.send(Fault(str(first_failure(group))))


def _play(server: Server, request: PlayRequest) -> None:
    """Play the requested trial, and send `TrialEnd` to the server."""
    # Imported here because they import torch: the server takes only the messages of this module.
    from mage_services.actor.play_session import play_person_and_agent, prepare
    from mage_services.weights.weight_store import WeightFiles

    run = RunDirectory(Path(request.run))
    session = prepare(run, request.member or None, request.seed, episodes=None)

    def ask(prompt: HumanPrompt) -> str:
        """Request an action of the person, and wait for it."""
        server.send(Choices(tuple(prompt.choices), shown(prompt.choices)))
        answer = server.receive()
        if not isinstance(answer, Answer):  # the server has ended
            raise SystemExit
        return answer.text

    rewards, trial = uvloop.run(
        play_person_and_agent(
            session.make,
            session.task,
            WeightFiles(run.weights),
            ask if request.has_person else None,
            lambda text: server.send(Text(text)),
        )
    )
    played = asdict(shown_trial(trial, session.chat.decode, None))  # no credit: no step trains it
    server.send(TrialEnd(played, session.task.member, session.version, rewards))


if __name__ == "__main__":
    main()
