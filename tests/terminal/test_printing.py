"""What is printed into a pipe goes nowhere once its reader has gone."""

import os
import subprocess
import sys

CODE = """
from mage_services.terminal import printing
with printing():
    for number in range(100_000):
        print(number)
"""


def test_a_reader_that_stops_early_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", CODE], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
