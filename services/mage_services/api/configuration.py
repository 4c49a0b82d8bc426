"""Build a configuration from Python values, and the configuration of a run that is resumed."""

import __future__

import ast
import importlib
import inspect
import linecache
import symtable
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import blake2s
from pathlib import Path
from textwrap import dedent
from types import FunctionType, MemberDescriptorType, ModuleType, NoneType
from typing import Any

import numpy as np

from mage_async import user_modules
from mage_async.admission.replay import NO_EFFECT_ON_TRIALS
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.config.tables import NONE
from mage_async.errors import ConfigError, RunError
from mage_async.methods.method import overriding
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import last_step, write_whole


def configure(
    file: str | Path | None = None,
    keys: Mapping[str, Any] | None = None,
    *,
    environment: type | str | None = None,
    method: str | None = None,
) -> Config:
    """Build a configuration: a file, a method's keys over it, and your keys over both.

    `mage.configure("scout", {"learner.steps": 40, "trial": {"episodes": 2}})` is what
    `mage train --config scout --set learner.steps=40 --set trial.episodes=2` resolves.

    Args:
        file: Path of a TOML file, or the name of a shipped one; None for the quickstart.
        keys: Values by key. A key is either dotted ("learner.steps"), or its value is a mapping of
            further keys. The value None is written as "none", which leaves out a table.
        environment: Name of an environment, or your class. A class of a script or a notebook is
            written into a file below `runs/own_code/`, together with the code that it uses, so that
            other processes can import it. Later commands about the run must be started in the same
            folder.
        method: Name of a method whose keys are set, as with `--method`.

    Returns:
        The whole configuration, immutable. `print(mage.dump(config))` shows it as TOML.

    Raises:
        ConfigError: there is no such file or key, a value is wrong, or a class cannot be imported
            by another process.
    """
    if file is not None and not isinstance(file, str | Path):
        raise ConfigError(
            f"the first argument of mage.configure is a file or the name of one, got {file!r:.60}: "
            "pass keys as the second one, or as keys=…"
        )
    given = assignments_of(keys or {})
    if environment is not None:
        given += assignments_of({"environment.name": environment})
    path = config_file.find(None if file is None else str(file))
    return config_file.load(path, given, method)


def assignments_of(keys: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return keys and values as texts `a.b=c`, as `--set` takes them. A class becomes its address
    (`address_of`), for which a class of `__main__` is written into a file.

    Raises:
        ConfigError: the keys are no texts, TOML has no such value, or a class cannot be imported by
            another process.
    """
    if not isinstance(keys, Mapping) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(
            'keys are a mapping of texts to values, such as {"learner.steps": 40}, got '
            f"{keys!r:.60}"
        )
    texts = list[str]()
    for key, value in keys.items():
        if isinstance(value, Mapping) and value:
            texts += assignments_of(value, f"{prefix}{key}.")
        else:
            texts.append(f"{prefix}{key}={config_file.toml_text(_as_toml(value, prefix + key))}")
    return texts


def _as_toml(value: Any, key: str) -> Any:
    """Return the value of a key as TOML has it; a class becomes its address."""
    # "none" leaves out a table. An option is no table: its class would get the text "none".
    if value is None and not key.startswith("environment.options."):
        return NONE
    if inspect.isclass(value):
        return address_of(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return _as_toml(value.item(), key)
    if isinstance(value, Mapping):
        return {str(name): _as_toml(each, f"{key}.{name}") for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_toml(each, key) for each in value]
    if isinstance(value, str | int | float):
        return value
    if key == "environment.name":
        raise ConfigError(
            f"{key}: give the name of an environment, or your class itself, got {value!r:.60}"
        )
    raise ConfigError(
        f"{key}: a {type(value).__name__} is no value of a key: give a number, a text, True or "
        "False, a list of them, or a mapping of keys, or leave the key out"
    )


def address_of(own_class: type) -> str:
    """Return `module:Class`, by which another process imports a class. A class of `__main__` is
    first written into a file below `OWN_CODE`.

    Raises:
        ConfigError: the class lies inside another one or a function, or uses something that
            cannot be written into a file.
    """
    if own_class.__module__ != "__main__" or own_class.__qualname__ != own_class.__name__:
        return user_modules.address_of(own_class)
    # Annotations that the script does not evaluate may have names that are defined later, or
    # nowhere.
    is_lazy = vars(sys.modules["__main__"]).get("annotations") is __future__.annotations
    first = ["from __future__ import annotations"] if is_lazy else []
    text = "\n\n\n".join([*first, *_sources(own_class, own_class.__name__, set())]) + "\n"
    digest = blake2s(text.encode(), digest_size=4).hexdigest()
    file = user_modules.OWN_CODE / f"{own_class.__name__.lower()}_{digest}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    # The name has a digest of the text, so a file of this name has this text already. It is not
    # written again, because processes of an earlier run may be importing it.
    if not file.exists():
        write_whole(file, text, is_durable=False)
    importlib.invalidate_caches()  # the folder may have been listed before
    return f"{'.'.join(file.with_suffix('').parts)}:{own_class.__name__}"


def _sources(value: Any, name: str, done: set[str]) -> Iterator[str]:
    """Yield lines of code that give `name` its value: first for each name of `__main__` that the
    value uses, then for the value itself.

    Args:
        done: Names for which code was yielded already; this call adds to them.

    Raises:
        ConfigError: the value of a name cannot be written as code.
    """
    if name in done:
        return
    done.add(name)
    defined = vars(sys.modules["__main__"])
    if isinstance(value, ModuleType):
        yield f"import {value.__name__} as {name}"
    elif (source := _import_source(value)) is not None:
        yield f"from {source[0]} import {source[1]} as {name}"
    elif (own_name := _other_name(value, name)) and defined.get(own_name) is value:
        yield from _sources(value, own_name, done)
        yield f"{name} = {own_name}"
    elif own_name is None and (inspect.isclass(value) or inspect.isfunction(value)):
        text = _text_of(value)
        # Names that every module defines for itself, such as `__name__`, are left to the file.
        known = defined.keys() - vars(ModuleType("")).keys()
        for each in sorted(_global_names(symtable.symtable(text, name, "exec")) & known):
            yield from _sources(defined[each], each, done)
            if isinstance(defined[each], ModuleType):
                yield from _submodule_imports(text, each, defined[each], done)
        yield text
        if inspect.isclass(value):
            for each, now in _set_later(value, text):
                yield from _sources(now, f"{name}.{each}", done)
    elif _is_literal(value):
        yield f"{name} = {value!r}"
    else:
        raise ConfigError(
            f"`{name}` is a {type(value).__name__}, which cannot be written into a file for the "
            "other processes: put the class, and what it uses, into a module of its own"
        )


def _set_later(own_class: type, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each attribute that was set after the text of its class had run,
    as by `Door.max_turns = 3` in a later cell of a notebook.

    Three kinds of attributes count as unchanged: one whose name begins with "_", a value that the
    text computes, and a list, dict or set, in which a class may keep its state.
    """
    table: symtable.SymbolTable = symtable.symtable(text, own_class.__name__, "exec")
    while table.get_type() != "class":  # the last child: lambdas in decorators precede it
        table = table.get_children()[-1]
    in_text = {each.get_name() for each in table.get_symbols() if each.is_local()}
    body = next(each for each in ast.parse(text).body if isinstance(each, ast.ClassDef)).body
    methods, values = set[str](), dict[str, ast.expr]()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            methods.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                values |= {ast.unparse(name): each for name, each in pairs}
    defined = vars(sys.modules["__main__"])
    for name, now in vars(own_class).items():
        if name.startswith("_") or isinstance(now, MemberDescriptorType):
            continue
        if name not in in_text:
            yield name, now
        elif name in methods and inspect.isfunction(now):
            if now.__name__ == "<lambda>" or defined.get(now.__name__) is now:
                yield name, now
        elif isinstance(now, str | int | float | tuple | NoneType) and name in values:
            with suppress(ValueError):  # the text computes it
                if ast.literal_eval(values[name]) != now:
                    yield name, now


def _other_name(value: Any, name: str) -> str | None:
    """Return the name by which a class or function was defined, if it is another one than `name`;
    else None.
    """
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return None
    # The source of a lambda is the line that assigns it to `name`.
    return None if value.__name__ in (name, "<lambda>") else value.__name__


def _global_names(scope: symtable.SymbolTable) -> set[str]:
    """Return the names that code looks up, or may look up, among the globals of its module."""
    # In a class body, and at the top, a name may be read as a global before it is assigned, as in
    # `size = size`. In a function a name is either local or global.
    is_function = scope.get_type() == "function"
    names = {
        each.get_name()
        for each in scope.get_symbols()
        if each.is_global() or (each.is_referenced() and not is_function)
    }
    return names.union(*map(_global_names, scope.get_children()))


def _submodule_imports(text: str, name: str, module: ModuleType, done: set[str]) -> Iterator[str]:
    """Yield an import of each submodule that code reaches through a module.

    After `import xml.etree.ElementTree`, the name `xml` alone is defined; but `import xml` does not
    import `xml.etree.ElementTree`.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and (path := ast.unparse(node)).startswith(f"{name}."):
            full = module.__name__ + path.removeprefix(name)
            if full in sys.modules and full not in done:
                done.add(full)
                yield f"import {full}"


def _import_source(value: Any) -> tuple[str, str] | None:
    """Return the module from which a value can be imported, other than `__main__`, and its name
    there; None if there is none.
    """
    module = getattr(value, "__module__", None)
    # Aliases of `typing`, such as `List`, have a `_name`.
    name = getattr(value, "__name__", None) or getattr(value, "_name", None)
    if module in (None, "__main__") or not isinstance(name, str):
        return None
    # An instance has the `__module__` of its class, and cannot be imported from there.
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else None


def _is_literal(value: Any) -> bool:
    """Return whether `repr` of the value is a literal that evaluates to the value again."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (SyntaxError, ValueError):
        return False


def _text_of(value: Any) -> str:
    """Return the source of a class or function of a script, or of a cell of a notebook."""
    # `inspect.getsource` finds no class that a notebook cell defines. But the code objects of the
    # class's methods name the cell as their file, and their first lines lie within the class. The
    # first line of a decorated function is the line of its first decorator.
    functions = [value] if isinstance(value, FunctionType) else vars(value).values()
    for function in functions:
        if not isinstance(function, FunctionType):
            continue
        # A decorator of another module names that module as its file; the function within does not.
        code = inspect.unwrap(function).__code__
        for node in ast.walk(ast.parse("".join(linecache.getlines(code.co_filename)))):
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name == value.__name__
                and node.end_lineno is not None
                and node.lineno <= code.co_firstlineno + len(node.decorator_list)
                and code.co_firstlineno <= node.end_lineno
            ):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                lines = linecache.getlines(code.co_filename)[first - 1 : node.end_lineno]
                return dedent("".join(lines)).rstrip()
    try:
        # A class of a script may have no function of its own, only fields and a base class.
        return dedent(inspect.getsource(value)).rstrip()
    except (OSError, TypeError):
        raise ConfigError(
            f"the source of {value.__name__} cannot be found: put it into a module of its own"
        ) from None


NOT_TRAINED = (
    *("evaluation.", "transport.", "hardware.", "journal.", "supervision.", "doctor.", "tracking."),
    *(f"{part}.{key}" for part, keys in NO_EFFECT_ON_TRIALS.items() for key in keys),
)
"""Beginnings of keys that change neither the play of training trials nor the training."""


def training_changes(one: Config, other: Config) -> list[tuple[str, Any, Any]]:
    """Return the keys of training in which two configurations differ, with both values."""
    changed = config_file.differences(one, other, absent=NONE)
    return [each for each in changed if not each[0].startswith(NOT_TRAINED)]


def resumed_config(run_dir: Path, assignments: list[str], method: str | None = None) -> Config:
    """Return the configuration that a run recorded, with assignments written over it.

    Raises:
        ConfigError: an assignment names another environment or policy, fewer steps than the run has
            trained, a change that no step can use, or turns a method that replaces the trainer on
            or off.
        RunError: there is no run to resume.
    """
    run = RunDirectory(run_dir)
    if not run.config.is_file():
        raise RunError(
            f"{run_dir}: no config.toml, so there is no run to resume; begin one with --config"
        )
    config = config_file.load_recorded(run.config, assignments, method)
    recorded = config_file.load_recorded(run.config)
    # Weights have their shape from the beginning; their type may change.
    of_policy = [name for name in recorded.policy.__struct_fields__ if name != "dtype"]
    for key, new, old in (
        ("environment.name", config.environment.name, recorded.environment.name),
        ("policy.kind", config.policy.kind, recorded.policy.kind),
        *(
            (f"policy.{name}", *(getattr(each.policy, name, None) for each in (config, recorded)))
            for name in of_policy
        ),
    ):
        if new != old:
            was = f" {old!r}" if isinstance(old, str | int | float) else ""
            raise ConfigError(
                f"--resume goes on with the run's own {key}{was}: leave the key out, or begin "
                f"another run with this one's weights: mage train --from {run_dir} --set …"
            )
    # `start_to_report.run_to_end` reports damaged lines, and the learner removes them.
    num_trained = last_step(run.metrics)
    if config.learner.steps < num_trained:
        raise ConfigError(
            f"learner.steps must be at least {num_trained}, which the run has trained already, got "
            f"{config.learner.steps}; mage evaluate RUN_DIR --checkpoint STEP measures an earlier "
            "step"
        )
    unused = [
        key
        for key, _, _ in training_changes(recorded, config)
        if key != "learner.steps" and not key.startswith("engine.")
    ]
    if unused and config.learner.steps == num_trained:
        raise ConfigError(
            f"{', '.join(unused)}: the run has trained all of its {num_trained} steps, so that no "
            "step would be trained with this change: raise learner.steps too, or begin another run "
            f"with this one's weights: mage train --from {run_dir} --set …"
        )
    # Methods that replace the trainer, and that only one of the two configurations turns on.
    changed = set(overriding(config, "trainer")) ^ set(overriding(recorded, "trainer"))
    if changed:
        raise ConfigError(
            f"--resume can neither add nor leave out methods.{min(changed)}, which trains in "
            "its own way from the beginning of a run: start a run of its own"
        )
    return config
