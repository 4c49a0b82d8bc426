"""The episodes of a trial share the engine's context: none is dropped for its length."""

from pathlib import Path

import pytest

from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file

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


@pytest.mark.parametrize("memory", ["history", "reflection"])
@pytest.mark.parametrize("observation", ['"more more more"', '"more " * 90', '"more " * 5000'])
def test_an_episode_ends_where_it_has_used_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, observation: str
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS.format(observation=observation))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "endless", raising=False)
    settings = [
        *("environment.name=endless:Endless", "warm_start=none", f"trial.memory={memory}"),
        *("admission.groups_per_step=1", "admission.trials_per_group=2", "engine.max_tokens=200"),
    ]
    config = config_file.load(config_file.find(None), settings)
    run = InProcessRun(config, prepare(config, tmp_path))
    for trial in run.play_batch()[0].trials:
        assert trial.num_cut_episodes == trial.num_played() == 3
        assert max(turn.stop for turn in trial.turns) <= 200
        earned = trial.episode_rewards()
        assert min(earned) >= 1.0, "an episode that was cut keeps what it had earned"
        if observation == '"more more more"':
            assert max(earned) < 1.5 * min(earned), "the shares are alike"


def test_an_episode_is_cut_before_a_strategy_leaves_no_room_for_its_action(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS.format(observation='"more more"'))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "endless", raising=False)
    for max_tokens in range(150, 162, 2):
        settings = [
            *("environment.name=endless:Endless", "warm_start=none", "trial.strategy=turn"),
            *("admission.groups_per_step=1", "admission.trials_per_group=2", "trial.episodes=1"),
            *("transcript.max_reflection_tokens=6", f"engine.max_tokens={max_tokens}"),
        ]
        config = config_file.load(config_file.find(None), settings)
        for trial in InProcessRun(config, prepare(config, tmp_path)).play_batch()[0].trials:
            assert trial.num_cut_episodes == 1
