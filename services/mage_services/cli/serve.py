"""`mage serve RUN`: answer with a run's policy over OpenAI's chat completions."""

import argparse
import sys
from pathlib import Path

from mage_services.cli.options import add_checkpoint, add_server, add_set

HELP = "Serve a run's policy over OpenAI's chat completions."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run and the address."""
    parser.epilog = (
        "The `messages` of a request are the whole conversation, or only the new messages if the "
        "header X-Session-Id names the conversation. Agent programs are answered as in training: "
        "over three protocols, and with tools. Anybody who reaches the port may use it; "
        "there is no authentication. Ctrl-C ends it."
    )
    parser.add_argument("run_dir", type=Path)
    add_checkpoint(parser)
    add_server(parser, "conversations that are remembered")
    add_set(parser, "change one key, such as engine.kind=sglang or engine.max_tokens=8192")


def run(given: argparse.Namespace) -> int:
    """Serve until Ctrl-C.

    Raises:
        RunError: the run has no policy, or the address cannot be bound.
    """
    import uvloop

    uvloop.run(_serve(given))
    return 0


async def _serve(given: argparse.Namespace) -> None:
    """Serve the policy until SIGINT or SIGTERM."""
    from mage_async.environments.agent import AgentTasks
    from mage_async.results.run_directory import RunDirectory
    from mage_services.api.policy import Policy
    from mage_services.environments.call_runner import CallRunner
    from mage_services.serving.chat_server import ChatServer
    from mage_services.serving.session import serve

    run = RunDirectory(given.run_dir.resolve())
    policy = Policy(run, given.set, given.checkpoint)

    def say(address: str) -> None:
        print(f"serving version {policy.version} of {run.root.name} at {address}/v1", flush=True)

    where = given.host, given.port, CallRunner(), say
    if isinstance(policy.environment, AgentTasks):
        async with policy.programs(policy.environment, "serve", given.sessions) as programs:
            await serve(programs.application, *where)
        return
    async with policy.conversations("serve", given.sessions) as conversations:
        if conversations.needs_regex:
            most = policy.config.transcript.max_action_tokens
            print(
                "legal actions change from turn to turn: send those of each turn in the field "
                f'`regex` of the request, such as "look|go left"; without it an answer ends after '
                f"{most} tokens (transcript.max_action_tokens)",
                file=sys.stderr,
                flush=True,
            )
        application = ChatServer(conversations, run.root.name).application
        await serve(application, *where)
