"""`mage plan CONFIG`: what a run will need, and whether that fits, before anything is loaded."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mage_async.config.schema import Config

HELP = "Say what a configuration needs of memory and time, and whether that fits."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration and the hardware."""
    parser.epilog = (
        "The learner's own code runs one update on tensors without values, so nothing is "
        "downloaded and no GPU is needed. `mage train` does this before a launch on a GPU."
    )
    parser.add_argument(
        "config", nargs="?", help="a TOML file, or the name of a shipped one (quickstart)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a key")
    parser.add_argument("--method", metavar="NAME", help="write a published method over it")
    parser.add_argument("--actors", type=int, default=1, metavar="N", help="actor processes (1)")
    parser.add_argument(
        "--memory-gb",
        type=float,
        default=0.0,
        metavar="GB",
        help="memory of each GPU, or of this machine (that of hardware.gpu, or this machine's)",
    )
    parser.add_argument(
        "--context-tokens",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a context on average (engine.max_tokens, the most there can be)",
    )
    parser.add_argument(
        "--tflops",
        type=float,
        default=0.0,
        metavar="RATE",
        help="10^12 operations a second that were measured (what the GPU's data sheet says)",
    )
    parser.add_argument(
        "--gpus", type=int, default=0, metavar="N", help="divide N GPUs between learner and engines"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=0,
        metavar="N",
        help="ranks of the learner among --gpus (as many as make a step shortest)",
    )
    parser.add_argument(
        "--link-gb-s",
        type=float,
        default=0.0,
        metavar="RATE",
        help="10^9 bytes a second that a GPU sends (what its data sheet says of one host)",
    )


def run(given: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        ConfigError: the run would not fit; or the hardware is not known.
    """
    from mage_async.assembly import check
    from mage_async.config import config_file
    from mage_async.plan.cluster import cluster_of
    from mage_async.plan.plan import plan_of
    from mage_async.plan.ranks import blocks_of
    from mage_async.plan.shapes import meta_model, shape_of
    from mage_async.plan.text import as_lines, cluster_lines
    from mage_services.processes.hardware import device_for
    from mage_services.terminal.printing import printing

    config = config_file.load(config_file.find(given.config), given.set, given.method)
    check(config)
    device = device_for(config, given.memory_gb)
    plan = plan_of(config, device, given.actors, context_tokens=given.context_tokens)
    if given.gpus:
        rates = {"link_gb_s": given.link_gb_s, "tflops": given.tflops}
        blocks, ranks = blocks_of(meta_model(config, shape_of(config))), _ranks(config, given.ranks)
        cluster = cluster_of(plan, blocks, given.gpus, ranks=ranks, **rates)
        lines, spare = cluster_lines(cluster), cluster.spare()
    else:
        lines, spare = as_lines(plan, given.tflops), plan.spare()
    with printing():
        print("\n".join(lines))
    if not given.gpus:
        plan.check()
    print(f"fits, with {spare:.0%} to spare")
    return 0


def _ranks(config: "Config", asked: int) -> int:
    """Ranks to be planned; 0: any number. One where several would be refused, and why is said.

    Raises:
        ConfigError: several were asked for, and a run would refuse them.
    """
    import msgspec

    from mage_async.assembly import check
    from mage_async.errors import ConfigError

    several = msgspec.structs.replace(config.learner, ranks=max(2, asked))
    try:
        check(msgspec.structs.replace(config, learner=several))
    except ConfigError as refusal:
        if asked > 1:
            raise
        print(f"one rank: {refusal}")
        return 1
    return asked
