"""Run the command line of `mage_services.cli`: `python -m mage_async.launch`, also `mage`."""

import os
import sys
from typing import NoReturn

from mage_services.cli.main import leave
from mage_services.cli.main import main as run_command


def main() -> NoReturn:
    """Run the command in `sys.argv`; no process it starts imports from the current directory."""
    # Child processes inherit it. A file of the current directory could hide an installed module.
    os.environ["PYTHONSAFEPATH"] = "1"
    leave(run_command(sys.argv[1:]))


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current directory, which `python -m` puts before what is installed
    main()
