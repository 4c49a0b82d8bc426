"""`mage adapt`: whole measurements of known players through HTTP."""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from mage_async.assembly import environment_of
from mage_async.completion import Completion, Prompt
from mage_async.config import config_file
from mage_async.config.schema import Config, Tiny
from mage_async.errors import TurnLost
from mage_async.policy.load import build_tiny
from mage_async.results.run_directory import RunDirectory
from mage_services.actor import rollout
from mage_services.cli.adapt import _num_tasks, _show, add_arguments
from mage_services.cli.main import main
from mage_services.engines import chat_endpoint
from mage_services.terminal.plain_lines import make_view
from tests.helpers.chat_server import ChatServer, Fault, answer, answering, refusing
from tests.helpers.known_players import SignedBoxes, orbit_reply, reply_of
from tests.helpers.recorded_runs import unpack

GAME = "tests.helpers.known_players:SignedBoxes"


def adapt(url: str, out: Path, *more: str) -> int:
    model = f"openai:{url}#player"
    given = ["adapt", "--model", model, "--games", GAME, "--trials", "12", "--out", str(out)]
    return main([*given, *more])


def test_a_learner_is_certified_on_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ChatServer(reply_of("bayes"))
    with server.in_thread() as url:
        assert adapt(url, tmp_path, "--price", "1,10") == 0
        calls = server.num_requests
        # The same command finds everything recorded, and more tasks begin with the same ones.
        assert adapt(url, tmp_path) == 0
        assert server.num_requests == calls
        assert adapt(url, tmp_path, "--trials", "14") == 0
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert document["returns"]["own"][1] == [1.0, pytest.approx(1 - 0.05 ** (1 / 14))]
    assert document["num_tasks"] == 14
    assert document["costs"]["calls"] == server.num_requests
    # own, blind and three tries of each episode, and the last episode of two controls
    assert calls == 12 * 4 * (3 + 3 + 3 + 2)
    assert document["served"] == "player-1"
    page = (tmp_path / "certificate.html").read_text()
    assert document["sentence"] in page
    printed = capsys.readouterr()
    assert "player cannot be told" in printed.out or "player adapts" in printed.out
    assert f"{12 * 7} trials into" in printed.err
    assert "names none" not in printed.err


def test_a_game_that_cannot_be_loaded_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = ["adapt", "--model", "openai:http://127.0.0.1:9#player", "--out", str(out)]
    assert main([*given, "--games", "tests.helpers.known_players:NoBoxes"]) == 2
    assert "NoBoxes" in capsys.readouterr().err
    assert not out.exists()


def test_a_mix_is_refused_before_there_is_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = 'mix.parts=[{name = "rps"}, {name = "bandit"}]'
    out = tmp_path / "out"
    assert adapt("http://127.0.0.1:9/v1", out, "--games", "mix", "--option", parts) == 2
    assert "name its environments, as in --games rps,bandit" in capsys.readouterr().err
    assert not out.exists()


def test_no_price_is_stated_of_tokens_that_the_endpoint_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def uncounted(request: web.Request) -> web.Response:
        text = reply_of("bayes")((await request.json())["messages"])
        return web.json_response(answer(text) | {"usage": None})

    with ChatServer(reply_of("bayes"), {-1: uncounted}).in_thread() as url:
        assert adapt(url, tmp_path, "--price", "1,10", "--trials", "4") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "neither their number nor their price is known" in said
    assert "in money" not in said
    assert json.loads((tmp_path / "certificate.json").read_text())["costs"]["money"] is None


def test_an_endpoint_that_changes_its_settings_is_named_also_after_an_interruption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def of(fingerprint: str) -> Fault:
        async def reply(request: web.Request) -> web.Response:
            text = reply_of("bayes")((await request.json())["messages"])
            return web.json_response(answer(text) | {"system_fingerprint": fingerprint})

        return reply

    faults = dict.fromkeys(range(50), of("a")) | {50: refusing(401), -1: of("b")}
    with ChatServer(reply_of("bayes"), faults).in_thread() as url:
        assert adapt(url, tmp_path, "--trials", "4") == 1
        assert adapt(url, tmp_path, "--trials", "4") == 0
    assert "2 different settings" in " ".join(capsys.readouterr().out.split())
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert document["fingerprints"] == ["a", "b"]


class Unbounded(SignedBoxes):
    """Boxes whose range of returns is not declared."""

    min_return = max_return = None


def test_a_game_without_a_declared_range_is_scaled_by_the_range_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    games = ("--games", "tests.cli.test_adapt:Unbounded")
    with ChatServer(reply_of("bayes")).in_thread() as url:
        assert adapt(url, tmp_path, *games) == 0
    printed = capsys.readouterr()
    said = " ".join(printed.out.split())
    assert "names none of its 2 legal_actions, such as left, and" in printed.err
    assert "does not declare min_return and max_return" in said
    assert "the returns that were seen, 0 to 1;" in said or ", 0.25 to 1;" in said
    assert "does not declare" in (tmp_path / "certificate.html").read_text()


def test_a_name_of_a_class_is_never_printed_as_an_emoji(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    game = {"label": "tea:Tea", "sentence": "cannot be told"}
    costs = {"calls": 1, "prompt_tokens": 1, "completion_tokens": 1, "money": None}
    document = {"model": "a", "num_tasks": 1, "episodes": 1, "returns": {"tea:Tea: own": [[0, 0]]}}
    document |= {"games": [game], "warnings": ["tea:Tea: few"], "costs": costs, "sentence": ""}
    _show(document, tmp_path)
    make_view(Config(), RunDirectory(tmp_path), is_terminal=False).line("tea:Tea: few")
    assert capsys.readouterr().out.count("tea:Tea: ") == 4


def test_the_test_of_a_paper_has_its_games_and_its_number_of_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChatServer(orbit_reply).in_thread() as url:
        assert adapt(url, tmp_path, "--games", "orbit") == 0
        # A number of tasks that is given replaces the paper's 256.
        assert f"{12 * 2 * 7} trials into" in capsys.readouterr().err
        refused = adapt(url, tmp_path / "o", "--games", "maze,orbit")
    assert (refused, "must name different games" in capsys.readouterr().err) == (2, True)
    document = json.loads((tmp_path / "certificate.json").read_text())
    maze, code = document["games"]
    assert (maze["label"], maze["num_tasks"]) == ("maze", 12)
    assert maze["options"]["shapes"] == [[6, 6], [7, 6], [7, 7], [6, 7]]
    assert (code["label"], code["options"]["turns"]) == ("mastermind", 3)
    assert code["returns"]["own"][2] == [1.0, pytest.approx(1 - 0.05 ** (1 / 12))]
    assert code["returns"]["blind"][2][0] < 1.0
    assert maze["returns"]["own"][2][0] > maze["returns"]["own"][0][0]
    page = (tmp_path / "certificate.html").read_text()
    for sentence in (document["sentence"], maze["sentence"], code["sentence"]):
        assert sentence in page


def test_a_number_of_tasks_is_the_papers_unless_it_is_given() -> None:
    def number(*given: str) -> int:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return _num_tasks(parser.parse_args(["--model", "m", *given]))

    assert (number("--games", "orbit"), number(), number("--games", "rps")) == (256, 128, 128)
    assert number("--games", "orbit", "--trials", "7") == 7


def test_an_interrupted_measurement_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE_S", 0.001)
    server = ChatServer(reply_of("bayes"), {100: answering("hi", model="player-2")})
    whole = ChatServer(reply_of("bayes"))
    with server.in_thread() as url:
        assert adapt(url, tmp_path / "a", "--trials", "4") == 1
        assert "changed its model: 'player-1' has answered so far" in capsys.readouterr().err
        answers = len((tmp_path / "a" / "answers.jsonl").read_text().splitlines())
        assert adapt(url, tmp_path / "a", "--trials", "4") == 0
        used = server.num_requests
    with whole.in_thread(int(url.rpartition(":")[2].partition("/")[0])) as url:
        assert adapt(url, tmp_path / "b", "--trials", "4") == 0
    # Answers that were on their way when the other model came are asked for again.
    assert answers >= 100 - 16
    assert used <= whole.num_requests + 1 + 16
    first, second = (
        json.loads((tmp_path / name / "certificate.json").read_text()) for name in "ab"
    )
    assert first["tasks"] == second["tasks"]
    lines = (tmp_path / "a" / "sessions.jsonl").read_text().splitlines()
    sessions = [json.loads(line)["wall_s"] for line in lines]
    assert len(sessions) == 2
    assert first["costs"]["wall_s"] == sum(sessions)


def test_no_trial_rests_on_answers_of_an_endpoint_that_returned_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = dict.fromkeys(range(100, 130), answering(""))
    server = ChatServer(reply_of("bayes"), silent)
    with server.in_thread() as url:
        assert adapt(url, tmp_path, "--concurrency", "1", "--trials", "4") == 1
        assert "returned no text in 10 calls in a row" in capsys.readouterr().err
        assert adapt(url, tmp_path, "--concurrency", "1", "--trials", "4") == 0
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert document["costs"]["empty"] == 0
    assert document["returns"]["own"][1][0] == 1.0


def test_one_task_is_refused_before_the_model_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ChatServer(reply_of("bayes"))
    with server.in_thread() as url:
        assert adapt(url, tmp_path, "--trials", "1") == 2
        assert server.num_requests == 0
        assert "but the number of tasks (--trials) is 1: give a" in capsys.readouterr().err
        assert adapt(url, tmp_path, "--trials", "2") == 0


def test_answers_that_follow_another_history_are_asked_for_again(tmp_path: Path) -> None:
    one_by_one = ("--concurrency", "1")
    # Own, blind and three tries of 12 tasks; both controls of tasks 0 to 7; `swapped` and half of
    # `noise` of task 8.
    num_calls = 12 * 4 * 9 + 8 * 4 * 2 + 4 + 2
    server = ChatServer(reply_of("bayes"), {num_calls: refusing(401)})
    with server.in_thread() as url:
        assert adapt(url, tmp_path, *one_by_one) == 1
        # Task 12 has a history of more similar length to that of task 8 than any before it.
        assert adapt(url, tmp_path, *one_by_one, "--trials", "24") == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    others = {each["trial"] for each in answers if each["trial"].startswith(f"{GAME}/8/noise/")}
    assert others == {f"{GAME}/8/noise/10", f"{GAME}/8/noise/12"}
    assert server.num_requests == 24 * 4 * 11 + 1 + 2  # with the refused one and the two repeated


def test_an_endpoint_that_gives_up_says_how_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ChatServer(reply_of("bayes"), {-1: refusing(401, "no such key")})
    with server.in_thread() as url:
        assert adapt(url, tmp_path) == 1
    said = capsys.readouterr().err
    assert "refused: HTTP 401: no such key; put the key into OPENAI_API_KEY" in said
    assert f"0 trials and 0 answers are recorded in {tmp_path}; the same command" in said


def test_a_folder_that_cannot_be_made_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert adapt("http://127.0.0.1:9/v1", tmp_path / "file" / "out") == 2
    said = capsys.readouterr().err
    assert f"cannot write {tmp_path / 'file' / 'out'}: " in said
    assert "choose another --out" in said


def test_too_few_different_tasks_are_said_before_the_first_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ChatServer(reply_of("bayes"))
    with server.in_thread() as url:
        assert adapt(url, tmp_path, "--trials", "2") == 0
    said, _, _ = capsys.readouterr().err.partition("trials into")  # which is said before any call
    assert "no verdict can come of these 2 tasks: they hide 2 different things, and 12" in said


@pytest.mark.parametrize(
    "name", ["measurement.json", "answers.jsonl", "trials.jsonl", "certificate.html"]
)
def test_a_disk_that_fails_does_not_hide_how_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).mkdir()  # in whose place no file can be written
    with ChatServer(reply_of("bayes")).in_thread() as url:
        assert adapt(url, tmp_path, "--trials", "2") == 1
        said = capsys.readouterr().err
        assert "cannot write " in said
        assert "Is a directory" in said
        assert f"are recorded in {tmp_path}; the same command continues" in said
        (tmp_path / name).rmdir()
        assert adapt(url, tmp_path, "--trials", "2") == 0


def test_a_trial_that_the_engine_fails_in_every_try_is_cut_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = chat_endpoint.ChatEndpoint.complete

    async def lose_one(engine: chat_endpoint.ChatEndpoint, prompt: Prompt) -> Completion:
        if "/3/own" in prompt.context:
            raise TurnLost("the engine is gone")
        return await complete(engine, prompt)

    monkeypatch.setattr(chat_endpoint.ChatEndpoint, "complete", lose_one)
    monkeypatch.setattr(rollout, "RETRY_PAUSE_S", 0.0)
    with ChatServer(reply_of("bayes")).in_thread() as url:
        assert adapt(url, tmp_path, "--trials", "4") == 0
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [line["trial"] for line in lines if line["is_cut"]] == [f"{GAME}/3/own"]
    assert "tries: the engine is gone" in capsys.readouterr().err


def test_refused_actions_of_an_episode_that_was_not_finished_are_actions_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = chat_endpoint.ChatEndpoint.complete
    num_answers = Counter[str]()

    async def lose_the_third(engine: chat_endpoint.ChatEndpoint, prompt: Prompt) -> Completion:
        if num_answers[prompt.context] == 2:
            raise TurnLost("the engine is gone")
        num_answers[prompt.context] += 1
        return await complete(engine, prompt)

    monkeypatch.setattr(chat_endpoint.ChatEndpoint, "complete", lose_the_third)
    monkeypatch.setattr(rollout, "RETRY_PAUSE_S", 0.0)
    with ChatServer(lambda messages: "I press nothing.").in_thread() as url:
        assert adapt(url, tmp_path, "--trials", "2") == 0
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    counts = {(each["turns"], each["invalid"]) for each in lines if each["trial"].endswith("/own")}
    assert counts == {(2, 2)}
    warnings = json.loads((tmp_path / "certificate.json").read_text())["warnings"]
    shown = "such as 'I press nothing.', so the model may"
    assert f"{GAME}: 100 % of the actions were invalid, {shown}" in warnings[0]


def test_another_measurement_needs_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measurement.json").write_text('{"model": "openai:http://127.0.0.1:9/v1#player"}')
    assert adapt("http://127.0.0.1:9/v1", tmp_path) == 2
    assert "holds a measurement with version = null, not 0" in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["files", "sources"])
def test_a_changed_model_or_class_is_another_measurement(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changed: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"boxes_of_{changed}"  # a module is imported once
    code, model = Path(f"{name}.py"), tmp_path / "model"
    code.write_text("from tests.helpers.known_players import SignedBoxes as Boxes\n")
    words = ("red", "green", "blue", "gold", "left", "right")
    build_tiny(Tiny(), words, 0, model)
    command = ["adapt", "--model", "model", "--games", f"{name}:Boxes", "--trials", "2"]
    assert main([*command, "--out", "out"]) == 0
    if changed == "files":
        build_tiny(Tiny(), words, 1, model)
    else:
        code.write_text(code.read_text() + "Boxes.max_turns = 3\n")
    assert main([*command, "--out", "out"]) == 2
    said = {
        "files": 'with files = "',
        "sources": "from before a class of the games was edited",
    }
    assert f"out holds a measurement {said[changed]}" in capsys.readouterr().err


def test_a_class_that_repeats_has_no_chance_so_the_best_of_several_is_luck(tmp_path: Path) -> None:
    with ChatServer(reply_of("retries")).in_thread() as url:
        assert adapt(url, tmp_path, "--trials", "48") == 0
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert not any(task["has_chance"] for task in document["tasks"])
    assert document["luck"]["mean"] > 0.05  # 0.2 ± 0.04, by the order in which requests arrive


def test_reflections_replace_the_history(tmp_path: Path) -> None:
    contexts = []

    def reply(messages: list[dict[str, str]]) -> str:
        contexts.append(messages)
        said = messages[-1]["content"]
        return "<remark> red left </remark>" if "<remark>" in said else "<action> left </action>"

    with ChatServer(reply).in_thread() as url:
        assert adapt(url, tmp_path, "--memory", "reflection", "--episodes", "2") == 0
    noted = [each for each in contexts if "remark 1: red left" in each[0]["content"]]
    assert len(noted) == 12 * 4 * 3  # the second episode of own, swapped and noise
    assert all("needs" not in each[0]["content"] for each in noted)
    assert not json.loads((tmp_path / "certificate.json").read_text())["warnings"]


def test_reflections_without_tags_are_named(tmp_path: Path) -> None:
    with ChatServer(lambda messages: "<action> left </action>").in_thread() as url:
        assert adapt(url, tmp_path, "--memory", "reflection", "--episodes", "2") == 0
    (warning,) = json.loads((tmp_path / "certificate.json").read_text())["warnings"]
    # own, swapped and noise: the other arms have no reflections
    assert warning.startswith(f"{GAME}: in 36 of 72 trials a reflection was not in <remark> tags")


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ((), "at 1 tokens"),
        (("--memory", "reflection"), "at 1 or 3 tokens"),
        (("--memory", "reflection", "--max-tokens", "1"), "at 1 tokens"),
    ],
)
def test_a_model_directory_that_is_cut_off_names_the_limits_it_has(
    tmp_path: Path, given: tuple[str, ...], limits: str
) -> None:
    config = config_file.load(config_file.find(None))
    words, model = environment_of(config).facts.words, tmp_path / "model"
    build_tiny(Tiny(), words, 0, model)
    command = ["adapt", "--model", str(model), "--games", "rps", "--trials", "2", *given]
    if "--max-tokens" not in given:
        keys = ("transcript.max_action_tokens=1", "transcript.max_reflection_tokens=3")
        command += [word for key in keys for word in ("--set", key)]
    command += ["--out", str(tmp_path / "out"), "--set", "engine.max_tokens=4096"]
    # A restricted action is never cut off.
    command += ["--set", "sampling.restricted=false"]
    assert main(command) == 0
    (warning,) = [
        each
        for each in json.loads((tmp_path / "out" / "certificate.json").read_text())["warnings"]
        if "were cut" in each
    ]
    assert limits in warning


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--model", "openai:http://x/v1"), "must be openai:URL#NAME"),
        (("--model", "openai:x#m"), "must begin with http:// or https://"),
        (("--model", "/nope"), "no run (config.toml) and no model (config.json) lies there"),
        (("--games", "rps,rps"), "--games must name different games"),
        (("--games", "nope"), "nope"),
        (("--option", "boxes.boxes=5"), "--option takes GAME.KEY=VALUE with one of tests."),
        (("--set", "a=1"), "an endpoint takes --request"),
        (("--checkpoint", "best"), "--checkpoint is for a run"),
    ],
)
def test_wrong_options_are_one_sentence(
    more: tuple[str, str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert adapt("http://127.0.0.1:9/v1", tmp_path, *more) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--concurrency", "4"), "--concurrency is for an endpoint, openai:URL#NAME"),
        (("--requests-per-minute", "60"), "--requests-per-minute is for an endpoint"),
        (("--timeout", "10"), "--timeout is for an endpoint"),
        (("--patience", "10"), "--patience is for an endpoint"),
        (("--key-variable", "KEY"), "--key-variable is for an endpoint"),
        (("--request", "{}"), "--request is for an endpoint"),
        (("--checkpoint", "newest"), "--checkpoint is for a run"),
    ],
)
def test_an_option_that_does_not_apply_to_a_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, str], sentence: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["adapt", "--model", str(tmp_path), *more]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_of_a_tiny_policy_cannot_play_a_game_whose_words_it_lacks(
    make_run: Callable[..., RunDirectory], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(steps=1, finished=False)
    given = ["adapt", "--model", str(run.root), "--games", "bandit", "--out", str(tmp_path / "o")]
    assert main(given) == 2
    assert "words that this tiny policy was not built with" in capsys.readouterr().err


def test_a_pushed_folder_plays_as_its_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, found = unpack("finished", tmp_path).root, []
    assert main(["push", str(run), "--to", str(tmp_path / "pushed")]) == 0
    for model in (run, tmp_path / "pushed"):
        out = tmp_path / f"of_{model.name}"
        assert main(["adapt", "--model", str(model), "--trials", "2", "--out", str(out)]) == 0
        found.append(json.loads((out / "certificate.json").read_text())["tasks"])
    assert found[0] == found[1]
    assert main(["chat", str(tmp_path / "pushed")]) == 2
    assert "this is a model that `mage push` wrote" in capsys.readouterr().err
