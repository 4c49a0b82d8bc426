"""How the process of an SGLang engine begins: `python -m … FD`, under an actor.

SGLang's own processes import their parent's main module first, and this is all they find: they bind
their lives to their parent's before they import anything that takes long.
"""

import os

from mage_services.processes.parent_death_signal import PARENT, die_with_parent

if __name__ in ("__main__", "__mp_main__"):
    die_with_parent(int(os.environ[PARENT]))
    os.environ[PARENT] = str(os.getpid())
if __name__ == "__main__":
    from mage_services.engines.sglang.process import main

    main()
