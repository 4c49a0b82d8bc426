"""Run the command line, as `mage` does."""

import runpy

# Run `launch` under the name `__main__`: it then removes the current directory from `sys.path`.
runpy.run_module("mage_async.launch", run_name="__main__")
