"""Run the command line of `mage_services.cli`: `python -m mage_async.launch`, also `mage`."""

import os
import signal
import sys


def main() -> None:
    """Run the command in `sys.argv`. In this process and in those that it starts, no file of the
    current directory takes the place of an installed module.
    """
    # Child processes inherit the variable.
    os.environ["PYTHONSAFEPATH"] = "1"
    if __name__ == "__main__" and not sys.flags.safe_path:
        del sys.path[0]  # the current directory, which `python -m` puts before what is installed
    try:
        # Imported only now: these modules import many others, which such a file could replace.
        from mage_services.cli.main import leave
        from mage_services.cli.main import main as run_command

        status = run_command(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are imported
        sys.exit(128 + signal.SIGINT)
    # `leave` ends the process even if a user's environment has left a thread running.
    leave(status)


if __name__ == "__main__":
    main()
