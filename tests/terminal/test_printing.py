"""What is printed where it cannot be written: into a pipe without a reader, or on a full disk."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_a_character_that_the_locale_lacks_is_no_error() -> None:
    code = "from mage_services.terminal import printing\nwith printing():\n    print('0 ± 1')"
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=ascii_only)
    assert (done.stdout, done.stderr) == (b"0 ? 1\n", b"")


OTHER_PIPE = """
import os
from mage_services.terminal import printing
reading, writing = os.pipe()
os.close(reading)
with printing():
    print("of interest")
    os.write(writing, b"to nobody")
"""


def test_another_pipe_without_a_reader_is_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", OTHER_PIPE], capture_output=True)
    assert done.returncode == 1
    assert b"BrokenPipeError" in done.stderr


LONG = """
import resource
from mage_services.terminal import lasting_output
with lasting_output():
    print("first", flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    for number in range(3):
        print("second", number, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print("third", flush=True)
"""


def test_a_long_command_goes_on_while_its_output_cannot_be_written(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run([sys.executable, "-c", LONG], stdout=log, stderr=subprocess.PIPE)
    said = b"stdout cannot be written: File too large. The command goes on without it\n"
    assert (done.returncode, done.stderr) == (0, said)
    first, *_, third, last = (tmp_path / "log").read_text().splitlines()
    # Without a buffer (PYTHONUNBUFFERED) the third line follows the beginning of the second.
    assert (first, third.endswith("third")) == ("first", True)
    assert last == "Lines may be missing above: File too large"


def test_a_full_disk_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "mage_async.launch", "config"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    said = "mage config: [Errno 28] No space left on device; make room\n"
    assert (done.returncode, done.stderr) == (2, said)
