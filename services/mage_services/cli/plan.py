"""`mage plan CONFIG`: estimate the memory and time of a run, before any weights are loaded."""

import argparse

from mage_services.cli.options import add_config, add_number, add_set, amount, positive

HELP = "Estimate the memory and time that a configuration needs, and check that it fits."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration and the hardware."""
    parser.epilog = (
        "The learner's own code runs one update on meta tensors, which have no values, so no "
        "weights are downloaded and no GPU is needed. `mage train` does this before a run on a GPU."
    )
    add_config(parser, "config", nargs="?")
    add_set(parser, "change a key")
    parser.add_argument(
        "--method", metavar="NAME", help="set the keys of a published method, before --set"
    )
    add_number(parser, "--actors", "actor processes (default: as of `mage train`)", type=positive)
    memory = "memory of each GPU, or of this machine (default: as found, or that of hardware.gpu)"
    add_number(parser, "--memory-gb", memory, default=0.0, type=amount, metavar="GB")
    tokens = "tokens of a context on average (default: engine.max_tokens, the largest number)"
    add_number(parser, "--context-tokens", tokens, default=0)
    rate = "measured speed in 10^12 operations a second (default: what the GPU's data sheet says)"
    add_number(parser, "--tflops", rate, default=0.0, type=amount, metavar="RATE")


def run(given: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        ConfigError: the run would not fit; or the hardware is not known.
        PolicyError: the policy's shape is unknown, or it cannot be trained as configured.
    """
    from mage_services.processes.child_process import waiting_notice
    from mage_services.processes.cores_and_memory import memory_bytes

    with waiting_notice("the plan, of an update without weights"):  # the imports take seconds too
        from mage_async.assembly import check
        from mage_async.config import config_file
        from mage_async.config.defaults import default_actors
        from mage_async.plan.plan import device_for, plan_lines, plan_of

        config = config_file.load(config_file.find(given.config), given.set, given.method)
        check(config)
        device = device_for(config, machine_bytes=memory_bytes(), memory_gb=given.memory_gb)
        actors = given.actors or default_actors(config)
        plan = plan_of(config, device, actors, context_tokens=given.context_tokens)
    print("\n".join(plan_lines(plan, given.tflops)))
    plan.check()
    print(f"fits, with {plan.spare():.0%} to spare")
    return 0
