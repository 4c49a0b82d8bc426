"""The episodes of a trial share the engine's context: none is dropped for its length."""

import sys
from pathlib import Path

import pytest

from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.trajectory import Trial

ENDLESS = '''
class Endless:
    """Nothing ends here by itself."""

    words = ("go", "more")
    legal_actions = ("go", "more", "go more go more")
    max_turns = 1000

    def reset(self, seed, task):
        return "more"

    def step(self, action):
        return {observation}, 1.0, False
'''


def trials_of(
    source: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *keys: str
) -> tuple[Trial, ...]:
    """The two trials of a group in the class `Endless` of a module's source."""
    (folder / "endless.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "endless", raising=False)
    settings = [
        *("environment.name=endless:Endless", "warm_start=none", *keys),
        *("admission.groups_per_step=1", "admission.trials_per_group=2"),
    ]
    config = config_file.load(config_file.find(None), settings)
    return InProcessRun(config, prepare(config, folder)).play_batch()[0].trials


@pytest.mark.parametrize("memory", ["history", "reflection"])
@pytest.mark.parametrize("observation", ['"more more more"', '"more " * 90', '"more " * 5000'])
def test_an_episode_ends_where_it_has_used_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, observation: str
) -> None:
    source = ENDLESS.format(observation=observation)
    keys = f"trial.memory={memory}", "engine.max_tokens=200"
    for trial in trials_of(source, tmp_path, monkeypatch, *keys):
        assert trial.num_cut_episodes == trial.num_played() == 3
        assert max(turn.stop for turn in trial.turns) <= 200
        earned = trial.episode_rewards()
        assert min(earned) >= 1.0, "an episode that was cut keeps what it had earned"
        if observation == '"more more more"':
            assert max(earned) < 1.5 * min(earned), "the shares are alike"


def test_an_episode_is_cut_before_a_strategy_leaves_no_room_for_its_action(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ENDLESS.format(observation='"more more"')
    keys = "trial.strategy=turn", "trial.episodes=1", "transcript.max_reflection_tokens=6"
    for max_tokens in range(150, 162, 2):
        limit = f"engine.max_tokens={max_tokens}"
        for trial in trials_of(source, tmp_path, monkeypatch, *keys, limit):
            assert trial.num_cut_episodes == 1


LONG_END = (
    ENDLESS.replace("max_turns = 1000", "max_turns = 4")
    .replace("return {observation}, 1.0, False", "return self.said(), 1.0, self.left == 0")
    .replace(
        '        return "more"',
        '''        self.left = 4
        return "more"

    def said(self):
        self.left -= 1
        return "more " * 120 if self.left == 0 else "more"''',
    )
)


@pytest.mark.parametrize("memory", ["history", "reflection", "history_and_reflection", "none"])
@pytest.mark.parametrize("max_tokens", [150, 200, 300, 400, 2000])
def test_a_last_observation_without_room_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, max_tokens: int
) -> None:
    keys = f"trial.memory={memory}", "transcript.max_reflection_tokens=8"
    limit = f"engine.max_tokens={max_tokens}"
    for trial in trials_of(LONG_END, tmp_path, monkeypatch, *keys, limit):
        assert trial.num_played() == 3
        assert max_tokens < 400 or trial.episode_rewards() == [4.0] * 3
        assert max(turn.stop for turn in trial.turns) <= max_tokens


LONGER = (
    ENDLESS.replace("legal_actions = ", "ACTIONS = ")
    .replace(
        "max_turns = 1000",
        """max_turns = 1000

    @property
    def legal_actions(self):
        return ("go " * 60 + "go", "more") if self.turn > 2 else ("go", "more")""",
    )
    .replace('return "more"', 'self.turn = 0; return "more"')
    .replace("return {observation}, 1.0, False", 'self.turn += 1; return "more", 1.0, False')
)


def test_an_episode_is_cut_before_an_action_that_later_turns_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = "trial.episodes=1", "engine.max_tokens=200"
    for trial in trials_of(LONGER, tmp_path, monkeypatch, *keys):
        assert trial.num_cut_episodes == 1
        assert max(turn.stop for turn in trial.turns) <= 200
