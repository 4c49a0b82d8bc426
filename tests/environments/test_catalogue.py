"""The catalogue: finding an environment, or saying clearly why there is none."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mage_async.environments import catalogue
from mage_async.environments.environment import Environment, Split
from mage_async.environments.games.rps import Rps
from mage_async.environments.games.scout import Scout
from mage_async.errors import ConfigError

LIBRARIES = (f"{library}:…" for library in catalogue.LOADERS)
KNOWN = ", ".join((*catalogue.names(), *catalogue.EXTRAS, "mix", *LIBRARIES))
KNOWN += ", or your own class as `module:Class`"


class Quiet(Rps):
    """A user's own environment, with an option that has no default."""

    def __init__(self, volume: int) -> None:
        self.volume = volume


class Faceless(Scout):
    """Forgets its facts."""

    facts = None  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


class Half(Environment):
    """Inherits the protocol, and does next to nothing itself."""

    facts = Scout().facts

    def members(self, split: Split) -> tuple[str, ...]:
        return (f"{split}-1",)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's own."""
    module = ModuleType("own")
    vars(module).update(Quiet=Quiet, Faceless=Faceless, Half=Half, NotOne=dict, number=3)
    monkeypatch.setitem(sys.modules, "own", module)


@pytest.mark.parametrize("name", catalogue.names())
def test_every_name_loads_the_environment_that_calls_itself_so(name: str) -> None:
    assert catalogue.load(name).facts.name == name


def test_options_reach_the_class() -> None:
    assert catalogue.load("scout", cost=0.7).facts.min_return == pytest.approx(-3.0)
    assert (
        catalogue.load("mage_async.environments.games.scout:Scout", safe=0.1).rules().count("0.1")
        == 1
    )


@pytest.mark.usefixtures("own")
def test_a_class_of_ones_own_is_loaded_by_its_address() -> None:
    environment = catalogue.load("own:Quiet", volume=1)
    assert isinstance(environment, Quiet)
    assert environment.volume == 1


def test_a_module_in_the_current_folder_is_found_by_processes_that_run_without_it_on_their_path(
    tmp_path: Path,
) -> None:
    (tmp_path / "mygame.py").write_text(
        "import colorsys\n"
        "from mage_async.environments.games.rps import Rps\n"
        "class Coin(Rps): pass\n"
    )
    (tmp_path / "colorsys.py").write_text("raise ValueError('what is installed comes first')\n")
    load = "from mage_async.environments import catalogue; catalogue.load('mygame:Coin')"
    safely = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", load]
    subprocess.run(command, cwd=tmp_path, env=os.environ | safely, check=True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "rbs",
            {},
            "no environment 'rbs' (did you mean `rps`?); there are " + KNOWN,
        ),
        (
            "tea.Tea",
            {},
            "no environment 'tea.Tea' (did you mean `tea:Tea`?); there are " + KNOWN,
        ),
        (
            "./own/tea.py:Tea",
            {},
            "environment './own/tea.py:Tea': './own/tea.py' is no name of a module: write "
            "`tea:Tea`, and start in the folder of the file",
        ),
        (
            "chess",
            {},
            "no environment 'chess'; there are " + KNOWN,
        ),
        (
            "scout",
            {"cots": 1},
            "environment 'scout': unknown option `cots` (did you mean `cost`?); "
            "its options: safe, cost, wrong",
        ),
        ("rps", {"rounds": 5}, "environment 'rps': unknown option `rounds`; it has none"),
        ("rps", {"name": "x"}, "environment 'rps': unknown option `name`; it has none"),
        (
            "own:Quiet",
            {},
            "environment 'own:Quiet': needs the option `volume`: set environment.options.volume",
        ),
        (":Quiet", {}, "environment ':Quiet': write it as `module:Class`"),
        (
            "nowhere.at.all:Quiet",
            {},
            "environment 'nowhere.at.all:Quiet': cannot import 'nowhere.at.all': "
            "No module named 'nowhere'; start in the folder it lies in, or put that on PYTHONPATH",
        ),
        (
            "own.py:Quiet",
            {},
            "environment 'own.py:Quiet': cannot import 'own.py': No module named 'own.py'; 'own' "
            "is not a package; write 'own', the module without `.py`",
        ),
        (
            "own:Quit",
            {},
            "environment 'own:Quit': own has no class `Quit` (did you mean `Quiet`?)",
        ),
        ("own:number", {}, "environment 'own:number': `number` is a int, not a class"),
    ],
)
@pytest.mark.usefixtures("own")
def test_errors_say_what_was_got_and_what_there_is(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        catalogue.load(name, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["colorsys:Foo", "agent:colorsys:run", "time:Foo"])
def test_a_module_of_python_that_hides_a_file_of_the_user_s_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module_name = name.split(":")[-2]
    with pytest.raises(ConfigError, match=r"has no such function$|has no class `Foo`$"):
        catalogue.load(name)
    (tmp_path / f"{module_name}.py").write_text("class Foo:\n    pass\n")
    hides = rf"; it is .*, not the {module_name}\.py of this folder, .*: rename your file$"
    with pytest.raises(ConfigError, match=hides):
        catalogue.load(name)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("hangman", "says_word"),
        ("kuhn", "redeals"),
        ("mastermind", "repeats"),
        ("mastermind", "tells_last"),
        ("mastermind", "wins_only"),
        ("maze", "wins_only"),
        ("minesweeper", "wins_only"),
        ("wordle", "any_guess"),
        ("wordle", "tells_last"),
        ("wordle", "wins_only"),
    ],
)
def test_a_flag_is_true_or_false_and_no_text(name: str, option: str) -> None:
    # `--set environment.options.wins_only=False` is no TOML, and arrives as the text "False".
    with pytest.raises(ConfigError) as caught:
        catalogue.load(name, **{option: "False"})
    assert str(caught.value) == f"{name}: `{option}` must be true or false, got 'False'"


@pytest.mark.parametrize("name", ["lock", "lock.py"])
def test_a_module_without_its_class_is_recognised(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lock.py").write_text("class Lock: pass\n")
    with pytest.raises(ConfigError) as caught:
        catalogue.load(name)
    assert str(caught.value) == (
        f"no environment {name!r}; lock.py lies here: name its class as `lock:Class`"
    )
    with pytest.raises(ConfigError, match=r"no environment 'x+'; there are bandit"):
        catalogue.load("x" * 1000)


def test_a_class_in_a_folder_is_named_with_the_folder_to_start_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("deeper").mkdir()
    Path("deeper/deeper.py").write_text("class Deeper: pass\n")
    with pytest.raises(ConfigError, match=r"start there \(cd deeper\): .* as `deeper:Class`"):
        catalogue.load("deeper/deeper.py")
    with pytest.raises(ConfigError, match="has no class `Deeper`; deeper is a folder here: cd dee"):
        catalogue.load("deeper:Deeper")


@pytest.mark.usefixtures("own")
def test_a_class_that_is_no_environment_hears_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"lacks `members`, `family`.*inherit mage_async"):
        catalogue.load("own:NotOne")
    with pytest.raises(ConfigError, match=r"its `facts` must be a `Facts`"):
        catalogue.load("own:Faceless")


@pytest.mark.usefixtures("own")
def test_what_is_inherited_of_the_protocol_alone_is_lacking_but_for_its_defaults() -> None:
    lacking = "`family`, `seats`, `rules`, `begin`, `script`, `swaps`, `references`; inherit"
    with pytest.raises(ConfigError, match=f"'own:Half': lacks {lacking}"):
        catalogue.load("own:Half")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("class Game:\n    def (\n", "line 2: SyntaxError: invalid syntax"),
        ("x = 1\nimport numpyy\n", "line 2: ModuleNotFoundError: No module named 'numpyy'"),
        ("x = {}\n\nx['dice']\n", "line 3: KeyError: 'dice'"),
        (
            "from mage_async.environments.games.rps import Rps\nclass Game(Rps):\n"
            "    def __init__(self):\n        raise ValueError('no dice\\nat all')\n",
            "line 4: ValueError: no dice",
        ),
    ],
)
def test_what_own_code_raises_is_said_in_a_line_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    file = tmp_path / "raising_game.py"
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    with pytest.raises(ConfigError) as caught:
        catalogue.load("raising_game:Game")
    assert str(caught.value) == f"environment 'raising_game:Game': {file}, {sentence}"
    assert caught.value.__cause__ is not None
