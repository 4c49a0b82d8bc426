"""Configuration files: TOML in, `Config` out, and errors that say what to write instead.

A file says what it is about; all other keys have the schema's defaults. It may begin with
`base = "other.toml"`, a path from its own folder: its keys replace those of the other file, section
by section. One level: a base has none itself. What a run records, compares and digests is the
resolved whole, without a trace of the base.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import tomli_w

from mage_async.config.assignments import Assignments
from mage_async.config.defaults import completed, spelled_out, stated_absent, without_empty
from mage_async.config.explain import Fault, explain, unwritable
from mage_async.config.methods import METHODS
from mage_async.config.older import upgraded
from mage_async.config.schema import Config
from mage_async.config.shape import Table, over
from mage_async.errors import ConfigError


def load(path: Path, assignments: Sequence[str] = (), method: str | None = None) -> Config:
    """Read a file and its base, write a method's keys and then `a.b=c` assignments over them, and
    check every key and value.

    Raises:
        ConfigError: what is wrong, beginning with the file or the assignment that says it.
    """
    return _parsed(_written(_resolved(path), assignments, method), str(path))


def load_recorded(path: Path, assignments: Sequence[str] = (), method: str | None = None) -> Config:
    """Read what a run recorded of itself, and write a method and assignments over it.

    Raises:
        ConfigError: as `load`; or a newer version recorded it.
    """
    return _parsed(_written(_read(path), assignments, method), str(path), is_recorded=True)


def read(data: bytes, where: str) -> Config:
    """Read a file's bytes; `where` begins the error."""
    return _parsed(Assignments(_tree(data, where)), where)


def loads(text: str) -> Config:
    """Read what `dump` gave, in this version or an older one."""
    tree = _tree(text.encode(), "configuration")
    return _parsed(Assignments(tree), "configuration", is_recorded=True)


def dump(config: Config) -> str:
    """The whole configuration as TOML; reading it gives an equal one."""
    return tomli_w.dumps(stated_absent(msgspec.to_builtins(config)))


def find(name: str | None) -> Path:
    """The file of that name, or the quickstart, installed or from a checkout."""
    shipped = [Path(__file__).parents[2] / "configs", Path(__file__).parents[1] / "configs"]
    folder = next((folder for folder in shipped if folder.is_dir()), shipped[0])
    if name is None:
        return folder / "quickstart.toml"
    for candidate in (Path(name), folder / name, folder / f"{name}.toml"):
        if candidate.is_file():
            return candidate
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.toml"))
    known = ", ".join(sorted(file.as_posix() for file in files))
    raise ConfigError(f"no configuration file {name!r}; shipped ones: {known}")


def _written(tree: Table, assignments: Sequence[str], method: str | None) -> Assignments:
    written = Assignments(tree)
    written.method(METHODS[method] if method else {})
    for assignment in assignments:
        written.give(assignment)
    return written


def _parsed(written: Assignments, where: str, *, is_recorded: bool = False) -> Config:
    """Turn plain data into a `Config`; `where` begins the error of what no assignment says."""
    if fault := unwritable(written.tree):
        raise _error(fault, written, where)
    tree = completed(written.tree, is_recorded=is_recorded)
    try:
        return without_empty(msgspec.convert(tree, Config))
    except msgspec.ValidationError as error:
        fault = explain(str(error), tree)
    if is_recorded and fault.is_unknown and not written.blamed(fault.key):
        raise ConfigError(
            f"{where}: a newer version of mage_async wrote it: this one has no such "
            f"`{fault.key}`; use the version that wrote it"
        )
    raise _error(fault, written, where)


def _error(fault: Fault, written: Assignments, where: str) -> ConfigError:
    return ConfigError(f"{written.blamed(fault.key) or where}: {fault.sentence}")


def _resolved(path: Path) -> Table:
    """A file's keys over those of its base, where it names one."""
    own = _read(path)
    name = own.pop("base", None)
    if name is None:
        return own
    if not isinstance(name, str):
        raise ConfigError(f"{path}: `base` must be the path of a file, got {name!r}")
    file = path.parent / name
    if not file.is_file():
        raise ConfigError(f"{path}: its base {name!r} is not there: {file}")
    below = _read(file)
    if "base" in below:
        raise ConfigError(
            f"{path}: its base {name!r} has a base itself, {below['base']!r}; there is one "
            "level: name that one, or copy its keys"
        )
    return over(below, own, Config)


def _read(path: Path) -> Table:
    try:
        return _tree(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _tree(data: bytes, where: str) -> Table:
    """A file's keys, as they are written today."""
    try:
        return spelled_out(upgraded(tomllib.loads(data.decode())))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: its values are nested too deeply") from None
