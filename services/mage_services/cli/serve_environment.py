"""`mage serve-environment NAME`: serve an environment over OpenEnv's or AgentGym's protocol."""

import argparse

from mage_services.cli.options import add_number, add_server, add_set, positive

HELP = "Offer an environment to other programs, over OpenEnv's or AgentGym's protocol."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the environment and the address."""
    parser.epilog = (
        "With OpenEnv each connection is a session, with AgentGym each created environment. "
        "Anybody who reaches the port may play; there is no authentication. Ctrl-C ends it."
    )
    parser.add_argument("name", help="as environment.name: rps, module:Class, gymnasium:Taxi-v4, …")
    protocols = ("openenv", "agentgym")
    parser.add_argument(
        "--protocol", choices=protocols, default=protocols[0], help="protocol (default: openenv)"
    )
    add_server(parser, "sessions that are open")
    idle = "seconds without a request after which a session is closed (default: 300)"
    add_number(parser, "--idle", idle, 300, type=positive, metavar="S")
    text = "change one key of the configuration, such as environment.options.turns=50"
    add_set(parser, text)


def run(given: argparse.Namespace) -> int:
    """Rehearse the environment (play a few episodes to check it) as before a run, then serve it
    until Ctrl-C.

    Raises:
        ConfigError: the environment cannot be loaded, or does not begin the same way twice.
    """
    import uvloop

    from mage_async.assembly import environment_of
    from mage_async.config import config_file
    from mage_services.actor.rehearsal_runner import rehearse_all
    from mage_services.environments.call_runner import CallRunner
    from mage_services.serving.agentgym_server import AgentGymServer
    from mage_services.serving.openenv_server import OpenEnvServer
    from mage_services.serving.session import Limits, serve

    assignments = [f"environment.name={given.name}", *given.set]
    # The quickstart's other keys, such as `trial.episodes`, serve as well.
    config = config_file.load(config_file.find(None), assignments)
    environment = environment_of(config)
    rehearse_all(config, print)
    limits = Limits(given.sessions, float(given.idle))

    def say(address: str) -> None:
        print(f"serving {given.name} at {address}, at most {limits.sessions} sessions", flush=True)

    workers = CallRunner(config.environment)
    kind = AgentGymServer if given.protocol == "agentgym" else OpenEnvServer
    application = kind(environment, limits, workers).application
    uvloop.run(serve(application, given.host, given.port, workers, say))
    return 0
