"""`mage view`: show runs in a browser of this machine, live."""

import argparse
import webbrowser
from pathlib import Path

from mage_services.cli.options import port

HELP = "Look at runs in a browser: from a curve to the tokens of one turn, live."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder and the port."""
    parser.epilog = (
        "The page is served to this machine alone, at an address with a secret in it. Runs may "
        "still be going on. From another machine: ssh -L PORT:127.0.0.1:PORT, with --port PORT."
    )
    parser.add_argument("runs_dir", type=Path, help="a run, or a folder of runs")
    parser.add_argument(
        "--port", type=port, default=0, metavar="N", help="TCP port (default: any free one)"
    )
    parser.add_argument("--open", action="store_true", help="open a browser")


def run(given: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    import uvloop

    from mage_services.processes.cores_and_memory import WATCHER, lower_priority
    from mage_services.view.server import serve

    def show_address(address: str) -> None:
        print(f"{given.runs_dir}: {address}\nCtrl-C ends it", flush=True)
        if given.open:
            webbrowser.open(address)

    # Next to a run on the same machine, the page takes little time from the learner.
    lower_priority(WATCHER)
    uvloop.run(serve(given.runs_dir, given.port, show_address))
    return 0
