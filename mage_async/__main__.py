"""Run the command line, as `mage` does."""

import runpy

# As `__main__`, `launch` takes the current directory out of `sys.path`.
runpy.run_module("mage_async.launch", run_name="__main__")
