"""Import classes of a user's own modules, and find components, such as environments or methods, by
name; each is imported when first used.

A component of the package is one line, `"name": "module:Class"`. A name with a colon is a class of
a user's own, which may also lie in the current folder. Any exception of a user's module becomes a
`ConfigError` of one line with the file and line number.
"""

import ast
import difflib
import dis
import importlib
import inspect
import os
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2s
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from mage_async.errors import ConfigError, MageError, error_text, first_line

_PROGRAM = ("mage_async", "mage_services", "mage_kernels")
"""Packages of this program."""
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
"""Folders of Python's own modules and of installed ones."""


def cache_folder() -> Path:
    """Return the folder of files that are kept between runs, such as policies after a warm start.

    It is in the user's cache or, for a user without a home, as in a container with any user id, in
    the temporary folder.
    """
    home = os.path.expanduser("~")  # stays "~" if there is none
    own = f"{tempfile.gettempdir()}/cache-{os.getuid()}" if home == "~" else f"{home}/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or own) / "mage_async"


class Registry:
    """Find components of one kind, such as environments, by their name.

    Args:
        noun: what an error calls a component, such as "environment".
        addresses: "module:Class" of each name.
        others: further names that an error lists, which the caller resolves itself.
    """

    def __init__(self, noun: str, addresses: Mapping[str, str], others: Iterable[str] = ()) -> None:
        self.noun = noun
        self._addresses, self._others = dict(addresses), tuple(others)

    def __contains__(self, name: object) -> bool:
        return name in self._addresses

    def __iter__(self) -> Iterator[str]:
        return iter(self._addresses)

    def load(self, name: str) -> type:
        """Import the class of a registered name, or of a `module:Class` of the user's own.

        Raises:
            ConfigError: the name is unknown, or its class cannot be imported.
        """
        is_own = name not in self
        if is_own and ":" not in name:
            module_name = name.removesuffix(".py")
            # `Path.is_file` raises an error for a name that is too long for a file.
            if os.path.isfile(file := f"{module_name.replace('.', '/')}.py"):
                raise ConfigError(
                    f"no {self.noun} {name!r}; {file} lies {_folder_of(file)}: name its class as "
                    f"`{Path(file).stem}:Class`"
                )
            known = [*self, *self._others]
            # Of "gymnasium:…" and other names of loaders, the part before the colon is compared.
            hint = did_you_mean(name.lower(), [each.removesuffix(":…") for each in known], most=2)
            parent, _, last = name.rpartition(".")
            if parent and last[:1].isupper():
                hint = f" (did you mean `{parent}:{last}`?)"
            raise ConfigError(
                f"no {self.noun} {name!r}{hint}; there are {', '.join(known)}, "
                "or your own class as `module:Class`"
            )
        module_name, _, class_name = self._addresses.get(name, name).partition(":")
        what = f"{self.noun} {name!r}"
        if not module_name or not class_name.isidentifier():
            raise ConfigError(f"{what}: write it as `module:Class`")
        if is_own and "/" in module_name:
            own = module_name.rpartition("/")[2].removesuffix(".py")
            raise ConfigError(
                f"{what}: {module_name!r} is no name of a module: write `{own}:{class_name}`, "
                "and start in the folder of the file"
            )
        module = import_own(module_name, what) if is_own else importlib.import_module(module_name)
        found = getattr(module, class_name, None)
        if found is None:
            classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
            hint = did_you_mean(class_name, classes)
            hint += hides_own_file(module)
            # Python takes a folder for an empty package.
            is_folder = getattr(module, "__file__", None) is None
            if is_folder and os.path.isfile(f"{module_name}/{module_name}.py"):
                hint = f"; {module_name} is a folder here: cd {module_name}"
            raise ConfigError(f"{what}: {module_name} has no class `{class_name}`{hint}")
        if not inspect.isclass(found):
            kind = type(found).__name__
            raise ConfigError(f"{what}: `{class_name}` is a {kind}, not a class")
        return found


def _folder_of(file: str) -> str:
    """Return a clause with the folder of a file; if it is not the current one, with the advice to
    start there.
    """
    folder = os.path.dirname(file)
    return f"in {folder}, so start there (cd {folder})" if folder else "here"


def hides_own_file(module: ModuleType) -> str:
    """Return "; it is /…/code.py, not the code.py of this folder, …" if a module of Python or of a
    package was imported in place of a file of the current folder; "" otherwise.
    """
    file = f"{module.__name__.replace('.', '/')}.py"
    imported = getattr(module, "__file__", None)
    is_itself = imported is not None and os.path.realpath(imported) == os.path.realpath(file)
    if is_itself or not os.path.isfile(file):
        return ""
    return (
        f"; it is {imported or 'a built-in module of Python'}, not the {file} of this folder, "
        "which has the same name: rename your file"
    )


def address_of(kind: type) -> str:
    """Return the `module:Class` by which every process loads a class. For a class of a script that
    runs as `__main__`, the module is the name under which other processes import the script.

    Raises:
        ConfigError: the class has no such name, because a function or another class contains it,
            or because it was typed into an interpreter.
    """
    module_name = kind.__module__
    if module_name == "__main__":
        main = sys.modules["__main__"]
        spec, file = (getattr(main, name, None) for name in ("__spec__", "__file__"))
        module_name = spec.name if spec else Path(file).stem if file else ""
    if not module_name or kind.__qualname__ != kind.__name__:
        raise ConfigError(
            f"the class {kind.__qualname__!r} cannot be imported by the processes of a run: define "
            "it at the top of a file"
        )
    return f"{module_name}:{kind.__name__}"


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return " (did you mean `x`?)" for the known names closest to `name`, "" without any."""
    near = difflib.get_close_matches(name, list(known), n=most)
    return f" (did you mean {' or '.join(f'`{match}`' for match in near)}?)" if near else ""


def check_inherits(own: type, base: str, what: str) -> None:
    """Refuse a user's class that inherits something else, or whose methods nothing calls.

    Args:
        base: "module:Class" of this program.
        what: see `import_own`.

    Raises:
        ConfigError: the class does not inherit `base`; or it has methods, and overrides none of
            what it inherits from this program: its hook has another name.
    """
    family = [each for each in own.__mro__ if each.__module__.partition(".")[0] in _PROGRAM]
    explained = f"{base.replace(':', '.')}, whose docstrings say what it has to do"
    if base not in [f"{each.__module__}:{each.__name__}" for each in family]:
        raise ConfigError(f"{what}: inherit {explained}")
    nearest = _methods_of(family[0])
    written = [name for name, value in _methods_of(own).items() if name not in nearest]
    if written and all(getattr(own, name) is value for name, value in nearest.items()):
        raise ConfigError(
            f"{what}: nothing calls its method `{written[0]}`{did_you_mean(written[0], nearest)}: "
            f"override one of {explained}"
        )


def _methods_of(kind: type) -> dict[str, Any]:
    """Return the public methods and properties of a class, inherited ones too, by name."""
    found = ((name, getattr(kind, name)) for name in dir(kind) if not name.startswith("_"))
    return {
        name: value
        for name, value in found
        if inspect.isfunction(value) or isinstance(value, property)
    }


def import_own(module_name: str, what: str) -> ModuleType:
    """Import a module of the user's own.

    Args:
        what: the component as an error begins with it, such as "environment 'game:Lock'".

    Raises:
        ConfigError: the module cannot be found, or raises while it is imported.
    """
    # The processes of a run have no entry for the current folder on their path (`PYTHONSAFEPATH`),
    # so that a checkout does not hide the installed package. The folder therefore comes last. It
    # is not looked up for a module that is imported already: that module may have changed to a
    # folder and deleted it, and then `os.getcwd` fails.
    if module_name not in sys.modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with as_config_error(what):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # A module that the user's module itself imports in vain is the user's error.
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            remedy = "start in the folder it lies in, or put that on PYTHONPATH"
            if module_name.endswith(".py"):
                remedy = f"write {module_name.removesuffix('.py')!r}, the module without `.py`"
            raise ConfigError(f"{what}: cannot import {module_name!r}: {error}; {remedy}") from None
        except SystemExit as error:
            raise ConfigError(
                f"{what}: {_place(error)} ended the program while {module_name!r} was imported "
                f"(SystemExit: {first_line(error)}): put that line under "
                '`if __name__ == "__main__":`'
            ) from error


def source_digest() -> str:
    """Return a digest of the sources of the three packages.

    The learner refuses an actor whose digest differs, and a cached warm start is used only by the
    program that made it.

    The packages are located without importing them, because the kernels import torch. If a package
    lies in two checkouts on the path, the first is read, which is also the one that is imported.
    """
    state = blake2s(digest_size=6)
    for package in _PROGRAM:
        spec = find_spec(package)
        assert spec is not None, f"{package} is not installed"
        folders = iter(spec.submodule_search_locations or ())
        for file in sorted(Path(next(folders)).rglob("*.py")):
            state.update(file.read_bytes())
    return state.hexdigest()


OWN_CODE = Path("runs") / "own_code"
"""Folder, relative to the current one, into which classes of scripts and notebooks are written."""


def shown_name(name: str) -> str:
    """Return an environment's name for people: without the file, if that lies in `OWN_CODE`."""
    return name.rpartition(":")[2] if name.startswith(".".join((*OWN_CODE.parts, ""))) else name


def own_source(module_name: str, what: str) -> str:
    """Return a digest of a user's module and of the modules of its folder that it imports; of an
    installed one, those of its package.

    Imports are read from the text, so that those inside functions count too.

    Args:
        what: see `import_own`.

    Raises:
        ConfigError: the module cannot be imported.
    """
    address = getattr(import_own(module_name, what), "__file__", None)
    if address is None or not address.endswith(".py"):
        return ""
    first = Path(address)
    # `a.b` lies in a/b.py, or in a/b/__init__.py, one folder deeper.
    depth = module_name.count(".") + (first.name == "__init__.py")
    root, found, waiting = first.parents[depth], dict[str, str](), [first]
    # Next to an installed package lie all other libraries, and reading torch alone takes minutes:
    # of an installed module, only its own package is read.
    is_installed = root.name in ("site-packages", "dist-packages")
    own = root / module_name.partition(".")[0] if is_installed else root
    while waiting:
        file = waiting.pop()
        name, is_own = file.relative_to(root).as_posix(), file == first or own in file.parents
        if name not in found and is_own and file.is_file():
            found[name] = file.read_text(errors="replace")
            waiting += _imported_files(found[name], file, root)
    return blake2s(repr(sorted(found.items())).encode(), digest_size=6).hexdigest()


def _imported_files(source: str, file: Path, root: Path) -> Iterator[Path]:
    """Yield the files in which the modules that a source imports would lie below `root`."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # if this module is imported, the import raises the error
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            base, names = root, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # One dot (`level` 1) is the folder of the file, two dots are the folder above it.
            base = [root, *file.parents][node.level] if node.level else root
            names = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
        else:
            continue
        for name in names:
            # The import of `a.b` runs a/__init__.py too; `b` may also be a name inside of `a`.
            for place in accumulate(name.split("."), Path.joinpath, initial=base):
                if place.is_relative_to(root) and place != root:
                    yield place.with_name(f"{place.name}.py")
                    yield place / "__init__.py"


@contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """Turn any exception of a user's code into one line.

    Raises:
        ConfigError: the code raised; with `what`, file, line, type and first line of the message.
    """
    try:
        yield
    except MageError:
        raise
    except (Exception, SystemExit) as error:  # anything may come out of foreign code
        text = error.msg if isinstance(error, SyntaxError) else error_text(error)
        first, *_ = text.strip().splitlines() or [""]
        kind = type(error).__name__
        raise ConfigError(f"{what}: {_place(error)}: {kind}: {first}") from error


def _place(error: BaseException) -> str:
    """Return the file and line that raised; for a syntax error, the line with the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    last = own_frame(error)
    return f"{last.filename}, line {last.lineno}" if last else "outside of any file"


def place_of(own: Callable[..., Any]) -> str:
    """Return " (FILE, line N)" of a user's method or class; "" for code of this program."""
    own = inspect.unwrap(own)
    if (getattr(own, "__module__", None) or "").partition(".")[0] in _PROGRAM:
        return ""
    try:
        _, line = inspect.getsourcelines(own)
        return f" ({inspect.getsourcefile(own)}, line {line})"
    except (TypeError, OSError):  # a callable object, or code of an interpreter, has no source
        return ""


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the last frame of a user's module through which an exception passed.

    Where an exception passed no module outside of the program and of installed libraries, this is
    the last frame of a library; `None` if there is none either.
    """
    frames = [
        traceback.FrameSummary(code.co_filename, line, code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not (code := frame.f_code).co_filename.startswith("<")
        and frame.f_globals.get("__name__", "").partition(".")[0] not in _PROGRAM
    ]
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    return (own or frames)[-1] if frames else None


def attribute_names(owners: Iterable[Any], action: str) -> set[str]:
    """Return the names of attributes that the functions of classes or modules read or set; see
    `_names_in`.
    """
    functions = (each for owner in owners for each in _functions(owner))
    return {name for each in functions for name in _names_in(each.__code__, action)}


def _functions(owner: Any) -> Iterator[Any]:
    """Yield the functions of a class or module, those of its properties and class methods too."""
    for value in vars(owner).values():
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property | cached_property):
            value = value.fget if isinstance(value, property) else value.func
        if inspect.isfunction(value) and inspect.isfunction(own := inspect.unwrap(value)):
            yield own


def _names_in(code: CodeType, action: str) -> Iterator[str]:
    """Yield the names of attributes that code reads ("LOAD") or sets ("STORE"). Texts count as
    read, because `getattr` takes one, and as set in a function that calls `setattr`.
    """
    names = [f"{action}_{kind}" for kind in ("ATTR", "METHOD")]
    if action == "LOAD" or "setattr" in code.co_names:
        names.append("LOAD_CONST")
    for each in dis.get_instructions(code):
        if each.opname in names and isinstance(each.argval, str):
            yield each.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):  # a function or comprehension in the function
            yield from _names_in(inner, action)
