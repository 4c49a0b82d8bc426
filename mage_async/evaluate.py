"""`python -m mage_async.evaluate RUN_DIR`: an older spelling of `mage evaluate RUN_DIR`."""

import sys

from mage_async.launch import main

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current directory, which `python -m` puts before what is installed
    sys.argv.insert(1, "evaluate")
    main()
