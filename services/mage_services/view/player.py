"""The process that a trial is played in, for a person who sits before a page; it has the engine.

Arguments: the run, and what was asked for as JSON. It says what the person is told, what may be
answered, and in the end what the agent did on the same task; the server says the answers.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from mage_async.errors import MageError
from mage_async.pages.turns import shown_trial
from mage_async.results.run_directory import RunDirectory
from mage_async.trials.human_play import HumanPrompt, shown
from mage_services.actor.play_session import prepare
from mage_services.processes.line_process import ServerLines
from mage_services.processes.process import first_failure

Asked = dict[str, Any]


def main() -> None:
    """Play one trial, by the person and then by the agent."""
    server = ServerLines()
    run, asked = RunDirectory(Path(sys.argv[1]).resolve()), json.loads(sys.argv[2])
    try:
        _play(server, run, asked)
    except* MageError as group:
        server.say({"fault": str(first_failure(group))})


def _play(server: ServerLines, run: RunDirectory, asked: Asked) -> None:
    from mage_services.actor.human_player import play_person_and_agent
    from mage_services.weights.weight_files import WeightFiles

    session = prepare(run, asked["member"] or None, asked["seed"], None)

    def ask(wanted: HumanPrompt) -> str:
        server.say({"choices": wanted.choices, "may": shown(wanted.choices)})
        answers = list(server.read(waits=True))
        if not answers:  # the server has ended
            raise SystemExit
        return answers[0]["answer"]

    rewards, trial = uvloop.run(
        play_person_and_agent(
            session.make,
            session.task,
            WeightFiles(run.weights),
            ask if asked["sits"] else None,
            lambda text: server.say({"told": text}),
        )
    )
    played = asdict(shown_trial(trial, session.chat.decode, None))
    end = {"member": session.task.member, "version": session.version, "rewards": rewards}
    server.say({"trial": played, **end})


if __name__ == "__main__":
    main()
