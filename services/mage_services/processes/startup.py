"""The arguments and files that every process of a run reads when it starts."""

import argparse
from dataclasses import dataclass
from hashlib import blake2s
from importlib.util import find_spec
from pathlib import Path

import mage_async
from mage_async.config import config_file
from mage_async.config.schema import Config, digest
from mage_async.results.run_directory import RunDirectory

PACKAGES = ("mage_async", "mage_services", "mage_kernels")


@dataclass(frozen=True, slots=True)
class Startup:
    """Arguments of a child process, and the configuration of its run."""

    run: RunDirectory
    config: Config
    config_digest: str
    build: str
    name: str
    address: str
    resume: bool
    keys: str = ""
    """Directory of the keys, on this machine; "" is none."""
    asks: bool = False
    """The run's directory is not on this machine: its files are asked for."""


def read_startup(description: str) -> Startup:
    """Parse a child's command line and read its run's configuration."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", default="")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--keys", default="")
    parser.add_argument("--asks", action="store_true")
    given = parser.parse_args()
    run = RunDirectory(given.run_dir)
    config = config_file.load_recorded(run.config)
    return Startup(
        run,
        config,
        digest(config),
        build_digest(),
        given.name,
        given.address,
        given.resume,
        given.keys or config.transport.keys,
        given.asks,
    )


def build_digest() -> str:
    """What this process was built from: the version, and the sources of the three packages.

    Peers compare it. The packages are found and not imported, for the kernels bring torch along.
    Of a package that lies in two checkouts on the path, the first is read, as imports do.
    """
    state = blake2s(mage_async.__version__.encode(), digest_size=6)
    for package in PACKAGES:
        found = find_spec(package)
        assert found is not None, f"{package} is not installed"
        folders = iter(found.submodule_search_locations or ())
        for file in sorted(Path(next(folders)).rglob("*.py")):
            state.update(file.read_bytes())
    return f"{mage_async.__version__}+{state.hexdigest()}"
