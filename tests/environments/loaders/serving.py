"""`mage serve-environment`, run as a person would."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Serve with these arguments on a free port; the address."""
    command = [sys.executable, "-m", "mage_async.launch", "serve-environment", "--port", "0"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = (re.search(r"at (http\S+),", line) for line in process.stdout)
            found = next(each for each in lines if each)
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
