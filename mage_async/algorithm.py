"""Run the algorithm in one file and one process: play trials, compute advantages, train, publish.

This is Algorithm 1 of MAGE (arXiv 2603.03680) with the parts of a real run: engine, trials, credit,
advantages, trainer, warm start. The processes, messages and journal, which make a run asynchronous
and durable, are left out. One step, `InProcessRun.step`, is:

1. **Tasks.** Each group of trials gets one task: an environment, a seed, a hidden opponent.
2. **Play.** A trial is several episodes of its task in one growing context, so later episodes can
   use the observations of earlier ones.
3. **Credit.** Rewards become returns (`mage_async/credit/returns.py`), returns become advantages,
   normalised over the turns that are compared with each other, such as the same turn of all trials
   of a group (`mage_async/learning/advantages.py`).
4. **Train.** The trainer makes `learner.minibatches` optimizer updates (`mage_async/learning/`).
5. **Publish.** The engine gets the new weights; the policy version grows by one.

`mage train`, with all its processes, makes the same weights bit by bit under `admission.rule =
"sync"`, `engine.arithmetic = "exact"` and one thread (`tests/end_to_end/test_algorithm.py`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mage_async.assembly import environment_of, trial_config_of
from mage_async.config.schema import Config, Embedded
from mage_async.environments.environment import Split
from mage_async.errors import ConfigError
from mage_async.inference.chat_files import load_chat
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler, play_trials
from mage_async.inference.weights import Weights, as_weights
from mage_async.learning.lora import merged_tensors
from mage_async.learning.trainer import trainer_of
from mage_async.methods.method import Methods
from mage_async.policy.initial_policy import policy_key, prepare_policy
from mage_async.policy.load import load_frozen_policies, load_trained
from mage_async.results.score import Score, score
from mage_async.tasks.league import League
from mage_async.tasks.task_stream import (
    FINAL_SEED,
    MatchedTasks,
    evaluation_tasks,
    indices_to_begin,
    swapped,
)
from mage_async.trajectory import Group, Guidance, Task, Trial
from mage_async.trials.duels import TrialInProgress, begin_trial
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialStart

OnBatch = Callable[[list[Group]], None]
"""A callback that is called with the groups of each batch before the batch is trained."""


def prepare(config: Config, folder: Path) -> Path:
    """Return the model directory of the warm-started policy.

    The first call makes it in `folder`. A later call finds it there, if the configuration, the
    source of the user's classes and this program have not changed since.
    """
    policy = folder / f"policy-{policy_key(config)}"
    if not policy.exists():
        prepare_policy(config, policy, lambda progress: None)
    return policy


class InProcessRun:
    """Train a policy in one process: play every batch with the weights that are trained on it, or
    with those of `admission.lag` steps ago.

    Args:
        policy: a model directory, as `prepare` made it.
    """

    def __init__(self, config: Config, policy: Path) -> None:
        if config.admission.replaced_groups:
            raise ConfigError("admission.replaced_groups must be 0 here: a batch is played once")
        engine = config.engine
        if not isinstance(engine, Embedded):
            raise ConfigError('a run in one process needs engine.kind = "embedded", got "sglang"')
        # The number of threads decides the order of sums, and so their last bits. Runs of a tiny
        # model have one thread by default.
        torch.set_num_threads(1)
        self._config, self._environment = config, environment_of(config)
        self._chat = load_chat(policy, thinking=config.transcript.thinking)
        model = load_trained(config, policy, device="cpu")
        self._trainer = trainer_of(config, model, self._chat)
        load_frozen_policies(self._trainer, config, policy)
        self._model_size = {"slots": engine.max_contexts, "max_tokens": engine.max_tokens}
        served = Model.load(policy, arithmetic=engine.arithmetic, **self._model_size)
        self._engine = Scheduler(served)
        self._past_policies: dict[int, Scheduler] = {}
        """Engines of the past policies that sit in the opponent's seat, by version."""
        self.methods = Methods(config, self._environment)
        self_play_share = self.methods.self_play_share()
        self.league = League(config.population, self._environment.facts, self_play_share)
        self._tasks = MatchedTasks(self._environment, self.league, config)
        self._num_evaluations = 0
        self._published = deque[tuple[int, Weights]](maxlen=config.admission.lag + 1)
        """The newest `admission.lag + 1` versions, oldest first; batches are played with the first,
        evaluations with the last."""
        self._served: int | None = None
        """The version that the engine has loaded."""
        self._publish()

    @property
    def model(self) -> PreTrainedModel:
        """The model under training."""
        return self._trainer.model

    @property
    def version(self) -> int:
        """The policy version: the number of steps trained."""
        return self._trainer.version

    def train(self, on_batch: OnBatch = lambda groups: None) -> list[list[float]]:
        """Train all steps.

        Args:
            on_batch: called with the groups of each batch before the batch is trained.

        Returns:
            float [steps, episodes]: mean return of each episode, per unit of the environment.
        """
        return [self.step(on_batch) for _ in range(self._config.learner.steps)]

    def step(self, on_batch: OnBatch = lambda groups: None) -> list[float]:
        """Make one step; return the mean return of each episode, float [episodes]."""
        groups = self.play_batch()  # 1. tasks, 2. play
        on_batch(groups)
        self._trainer.train(groups)  # 3. credit, 4. train
        self.league.trained(groups)
        self.methods.learn(groups)
        self._publish()  # 5. publish
        trials = [trial for group in groups for trial in group.trials]
        return score(trials, self._environment).return_by_episode

    def play_batch(self) -> list[Group]:
        """Play the groups of the next step: trials of one group share their task."""
        self._serve(*self._published[0])
        admission, version = self._config.admission, self.version
        num_groups, size = admission.groups_per_step, admission.trials_per_group
        numbers = range(version * num_groups, (version + 1) * num_groups)
        # Methods may shorten the horizon of early steps, advise at actions, and add to prompts.
        horizon = self.methods.horizon(version, self._config.trial.episodes)
        trial_config = self._trial_config(
            self._config.trial.episodes,
            stops_on_success=self._config.trial.stop_on_success,
            advisers=self.methods.advisers(),
        ).with_horizon(self._environment, horizon.num_episodes, horizon.max_turns)
        runs: list[TrialInProgress] = []
        guidances: list[Guidance | None] = []
        for number in numbers:
            task = self._tasks.task(number, version)
            guidance = self.methods.guidance(number, task)
            guidances.append(guidance)
            # In self-play one run makes two trials, one of each seat.
            for index in indices_to_begin(task, size):
                own = trial_config.with_guidance(guidance and guidance.for_trial(index))
                runs.append(self._begin(task, own, f"{number}.{index}", index))
        trials = iter(self._play(runs))
        return [
            Group(number, version, tuple(islice(trials, size)), guidance)
            for number, guidance in zip(numbers, guidances, strict=True)
        ]

    def evaluate(
        self,
        split: Split,
        num_trials: int,
        *,
        blind: bool = False,
        swap: bool = False,
        guided: bool = True,
    ) -> Score:
        """Play the fixed tasks with which a whole run is evaluated at its end.

        Args:
            blind: every episode begins without memory of the earlier ones.
            swap: the last episode has another opponent, about whom the earlier episodes say
                nothing.
            guided: trials begin with the guidance of a method, where one gives any.
        """
        trial_config = self._trial_config(self._config.evaluation.episodes)
        trial_config = trial_config.blind() if blind else trial_config
        self._serve(*self._published[-1])
        self._num_evaluations += 1
        runs: list[TrialInProgress] = []
        tasks = evaluation_tasks(self._environment, split, num_trials, FINAL_SEED)
        for number, task in enumerate(tasks):
            other = swapped(task, self._environment, split) if swap else None
            guidance = self.methods.evaluation_guidance(task) if guided else None
            name = f"e{self._num_evaluations}.{number}"
            runs.append(self._begin(task, trial_config.with_guidance(guidance), name, swap=other))
        return score(self._play(runs), self._environment)

    def _publish(self) -> None:
        """Copy the trainer's weights for the engine, and keep an engine for each past policy that
        may be an opponent.
        """
        version, served = self.version, self._engine.model
        named = merged_tensors(self.model)
        weights = as_weights(named, served.architecture, "trainer", served.arithmetic)
        self._published.append((version, weights))
        self.league.published(version)
        versions = self.league.rivals()
        if version in versions:
            model = Model(
                served.architecture, weights, arithmetic=served.arithmetic, **self._model_size
            )
            self._past_policies[version] = Scheduler(model)
        self._past_policies = {version: self._past_policies[version] for version in versions}

    def _serve(self, version: int, weights: Weights) -> None:
        """Load a version into the engine, unless the latest call loaded the same one."""
        if self._served != version:
            self._engine.swap(version, weights)
            self._served = version

    def _trial_config(self, episodes: int, **training: Any) -> TrialConfig:
        """Return what a trial needs to know; `training`: options that only training trials have."""
        return trial_config_of(self._config, self._environment, self._chat, episodes, **training)

    def _begin(
        self, task: Task, config: TrialConfig, name: str, index: int = 0, swap: Task | None = None
    ) -> TrialInProgress:
        """Begin a trial of a group's task.

        Args:
            index: number of the trial in its group.
            swap: task of the last episode; None: the same as before.
        """
        start = TrialStart(self._environment, task, index, config, self._chat, name, swap)
        return begin_trial(start)

    def _play(self, runs: Sequence[TrialInProgress]) -> list[Trial]:
        """Play trials to their end, all at once, and return them in the same order."""
        return play_trials(runs, self._engine, self._past_policies)
