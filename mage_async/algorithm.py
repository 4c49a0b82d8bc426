"""The algorithm in one file and one process: play trials, compute advantages, train, publish.

This is what a whole run computes (Algorithm 1 of MAGE, arXiv 2603.03680), with the real parts: the
engine's scheduler, trials, credit, advantages, trainer, warm start. What is left out is what makes
a run asynchronous and durable. One step:

1. **Tasks.** Each group of trials gets one task: an environment, a seed, a hidden opponent.
2. **Play.** A trial is several episodes of that task in one growing context, so later episodes can
   use what earlier ones showed.
3. **Credit.** Rewards become returns (`mage_async/credit/returns.py`), returns become advantages,
   normalised among the turns that are compared (`mage_async/learning/advantages.py`).
4. **Train.** The trainer makes `learner.minibatches` optimizer updates (`mage_async/learning/`).
5. **Publish.** The engine goes on with the new weights; the policy version grows by one.

A whole run under `admission.rule = "sync"` with `engine.arithmetic = "exact"` makes the same
weights, bit by bit (`tests/end_to_end/test_algorithm.py`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mage_async.assembly import environment_of, experts_of, rules_of
from mage_async.config.schema import Config
from mage_async.environments.catalogue import file_name
from mage_async.environments.environment import Split
from mage_async.graph_memory.memory import GraphMemory
from mage_async.inference.chat_files import load_chat
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler
from mage_async.inference.weights import Weights, as_weights
from mage_async.learning.adapters import merged_tensors
from mage_async.learning.soft_actor_critic.choice import trainer_of
from mage_async.policy.load import load_frozen_beside
from mage_async.policy.lora import load_trained
from mage_async.policy.prepare import prepare_policy
from mage_async.results.score import Score, score
from mage_async.tasks.curriculum import horizon
from mage_async.tasks.matchmaking import Matchmaker
from mage_async.tasks.population import League
from mage_async.tasks.seats import plays
from mage_async.tasks.task_stream import FINAL_SEED, TaskStream, evaluation_tasks, swapped
from mage_async.trajectory import Group, Trial
from mage_async.trials.duels.begin import Run, begin_trial, settle, trials_of

Look = Callable[[list[Group]], None]


def prepare(config: Config, folder: Path) -> Path:
    """The warm-started policy of a configuration as a model directory, made once a folder."""
    policy = folder / f"policy-{file_name(config.environment.name)}-{config.seed}"
    if not policy.exists():
        prepare_policy(config, policy, "in one process", lambda progress: None)
    return policy


class InProcessRun:
    """A run in one process: every batch is played with the weights that are trained on it."""

    def __init__(self, config: Config, policy: Path) -> None:
        """Load a policy, as `prepare` made it, into a trainer and an engine."""
        torch.set_num_threads(1)
        self._config, self._environment = config, environment_of(config)
        self._chat = load_chat(policy)
        model = load_trained(config, policy, device="cpu")
        self._trainer = trainer_of(config, model, self._chat, max_staleness=0)
        load_frozen_beside(self._trainer, config, policy)
        self._experts = experts_of(config)
        self._size = {
            "lanes": config.engine.max_contexts,
            "max_tokens": config.engine.max_tokens,
            "arithmetic": config.engine.arithmetic,
        }
        self._engine = Scheduler(Model.load(policy, **self._size))
        self._rivals: dict[int, Scheduler] = {}
        """Engines of older versions that sit in the opponent's seat, by version."""
        self.league = League(config.population, self._environment.facts)
        self._tasks = Matchmaker(
            TaskStream(self._environment, config.seed).task,
            self._environment,
            self.league,
            config.population,
            seed=config.seed,
            groups_per_step=config.admission.groups_per_step,
        )
        self.memory = GraphMemory(config, self._environment)
        self._num_evaluations = 0
        self._publish()

    @property
    def model(self) -> PreTrainedModel:
        """The model under training."""
        return self._trainer.model

    @property
    def version(self) -> int:
        """The policy version: how many steps were trained."""
        return self._trainer.version

    def train(self, look: Look = lambda groups: None) -> list[list[float]]:
        """Train all steps.

        Args:
            look: is shown the groups of each batch before that batch is trained.

        Returns:
            float [steps, episodes]: mean return of each episode, per unit of the environment.
        """
        return [self.step(look) for _ in range(self._config.learner.steps)]

    def step(self, look: Look = lambda groups: None) -> list[float]:
        """Play one batch, train on it, publish the new version; mean return of each episode."""
        groups = self.play_batch()
        look(groups)
        self._trainer.train(groups, self._config)
        self.league.trained(groups)
        self.memory.trained(groups)
        self._publish()
        trials = [trial for group in groups for trial in group.trials]
        return score(trials, self._environment).return_by_episode

    def play_batch(self) -> list[Group]:
        """The groups of the next step: trials of one task share its seed, opponent and openings."""
        step, rules = self._trainer.version, self._config.admission
        episodes = self._config.trial.episodes
        played = horizon(self._config.curriculum, step, episodes)
        how = rules_of(
            self._config,
            self._environment,
            self._chat,
            episodes,
            stops_on_success=self._config.trial.stop_on_success,
            expert=self._experts,
        ).under(self._environment, played.num_episodes, played.max_turns)
        first, size = step * rules.groups_per_step, rules.trials_per_group
        numbers = range(first, first + rules.groups_per_step)
        tasks = [(number, self._tasks.task(number)) for number in numbers]
        told = [self.memory.guidance(number, task) for number, task in tasks]
        runs = [
            begin_trial(
                self._environment,
                task,
                index,
                how.guided(guidance if guidance and index < guidance.num_guided else None),
                self._chat,
                name=f"{number}.{index}",
            )
            for (number, task), guidance in zip(tasks, told, strict=True)
            for index in plays(task, size)
        ]
        trials = self._play(runs)
        parts = [tuple(trials[begin : begin + size]) for begin in range(0, len(trials), size)]
        return [
            Group(number, step, part, guidance)
            for number, part, guidance in zip(numbers, parts, told, strict=True)
        ]

    def evaluate(
        self, split: Split, num_trials: int, *, swap: bool = False, guided: bool = True
    ) -> Score:
        """Play the final set of tasks of a split, as a whole run does.

        Args:
            guided: trials are told what the graph memory has learned, where there is one.
            swap: the last episode meets another opponent, so adaptation is worth nothing there.
        """
        episodes = self._config.evaluation.episodes
        rules = rules_of(self._config, self._environment, self._chat, episodes)
        self._num_evaluations += 1
        runs: list[Run] = []
        tasks = evaluation_tasks(self._environment, split, num_trials, FINAL_SEED)
        for number, task in enumerate(tasks):
            other = swapped(task, self._environment, split) if swap else None
            name = f"e{self._num_evaluations}.{number}"
            how = rules.guided(self.memory.best(task) if guided else None)
            runs.append(
                begin_trial(self._environment, task, 0, how, self._chat, name=name, swap=other)
            )
        return score(self._play(runs), self._environment)

    def _publish(self) -> None:
        """Give the engine the trainer's weights, and hold those versions that are rivals."""
        version, engine = self._trainer.version, self._engine
        named = merged_tensors(self._trainer.model)
        weights = as_weights(named, engine.architecture, "trainer", engine.arithmetic)
        engine.swap(version, weights)
        self.league.published(version)
        versions = self.league.rivals()
        if version in versions:
            self._rivals[version] = self._engine_of(weights)
        self._rivals = {version: self._rivals[version] for version in versions}

    def _engine_of(self, weights: Weights) -> Scheduler:
        size = self._size | {"arithmetic": self._engine.arithmetic}
        return Scheduler(Model(self._engine.architecture, weights, **size))

    def _play(self, runs: Sequence[Run]) -> list[Trial]:
        """Play trials, as many at once as the engine has room for contexts."""
        waiting, playing = list(reversed(runs)), dict[str, Run]()
        engines = [self._engine, *self._rivals.values()]
        while waiting or playing:
            while waiting and len(playing) < self._size["lanes"]:
                self._ask(waiting.pop(), playing)
            for engine in engines:
                for context, completion in engine.advance():
                    run = playing.pop(context)
                    run.receive(completion)
                    self._ask(run, playing)
        return [trial for run in runs for trial in trials_of(run)]

    def _ask(self, run: Run, playing: dict[str, Run]) -> None:
        """Submit a trial's next prompt, or free the contexts of a trial that is over."""
        settle(run)
        prompt = run.next_prompt()
        if prompt is not None:
            engine = self._engine if prompt.rival is None else self._rivals[prompt.rival]
            engine.submit(prompt)
            playing[prompt.context] = run
            return
        for context in run.contexts():
            for engine in (self._engine, *self._rivals.values()):
                engine.release(context)
