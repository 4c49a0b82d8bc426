"""`mage push RUN REPO`: upload a run's model to the HuggingFace hub, with a model card.

The card is made from the run: its configuration, its returns and the controls.
"""

import argparse
from pathlib import Path

from mage_services.cli.options import add_checkpoint

HELP = "Publish a run's model on the HuggingFace hub, with a card made from the run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run and the repository."""
    parser.epilog = (
        "The token is that of `hf auth login` or HF_TOKEN. With --to the folder is only written."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("repo", nargs="?", default="", metavar="REPO", help="such as me/scout-0.6b")
    add_checkpoint(parser)
    parser.add_argument("--to", type=Path, metavar="DIR", help="write the folder, upload nothing")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    licence = "licence of the model (default: that of the base model, if its card names one)"
    parser.add_argument("--license", default="", metavar="ID", help=licence)


def run(given: argparse.Namespace) -> int:
    """Write the folder, and upload it unless `--to` is given.

    Raises:
        ConfigError: neither a repository nor a folder is given, or both.
        RunError: the run has no policy, or the hub refuses.
    """
    from mage_async.errors import ConfigError
    from mage_async.results.run_directory import RunDirectory
    from mage_services.api.hub import push, write_folder

    run_dir = RunDirectory(given.run_dir.resolve())
    if bool(given.repo) == bool(given.to):
        raise ConfigError("give either a repository, such as me/scout-0.6b, or --to DIR")
    if given.to:
        write_folder(run_dir, given.to, given.license, given.checkpoint)
        print(f"written to {given.to}")
    else:
        more = {"license_id": given.license, "is_private": given.private}
        print(push(run_dir, given.repo, checkpoint=given.checkpoint, **more))
    return 0
