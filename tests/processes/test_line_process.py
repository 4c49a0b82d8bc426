"""The other side of a process that speaks JSON lines: nothing but messages reaches the server."""

import json
import subprocess
import sys

CODE = """
import os
from mage_services.processes.line_process import ServerLines
server = ServerLines()
for message in server.read(waits=True):
    print("a user's class prints")
    os.system("echo so does what it starts")
    server.say(message | {"answer": 42})
"""


def test_what_else_is_printed_goes_to_stderr() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], input='{"ask": 1}\n', capture_output=True, text=True
    )
    assert json.loads(done.stdout) == {"ask": 1, "answer": 42}
    assert "user's class prints" in done.stderr
    assert "so does what it starts" in done.stderr
