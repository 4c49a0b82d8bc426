"""A run in one process, on-policy: play a batch, train on it, again. For sweeps of many small runs.

The parts are the real ones (scheduler, trials, credit, advantage, trainer, scripted warm start);
what is left out is what makes a run asynchronous and durable. Tasks, seeds and the evaluation's
fixed sets are those of a whole run of the same configuration.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mage_async.assembly import environment_of, rules_of
from mage_async.config.schema import Config
from mage_async.environments.environment import Split
from mage_async.inference.chat_files import load_chat
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler
from mage_async.inference.weights import Weights, as_weights
from mage_async.learning.trainer import Trainer
from mage_async.learning.training_sequences import training_sequences
from mage_async.policy.load import load_policy
from mage_async.policy.prepare import prepare_policy
from mage_async.results.score import Score, score
from mage_async.tasks.curriculum import horizon
from mage_async.tasks.matchmaking import Matchmaker
from mage_async.tasks.population import League
from mage_async.tasks.task_stream import TaskStream, evaluation_tasks, swapped
from mage_async.trajectory import Group, Trial
from mage_async.trials.duel_run import Run, begin_trial

Look = Callable[[list[Group]], None]
FINAL_SEED = 2
"""Of the final sets, as `mage_services.actor.evaluator` has it."""


def prepare(config: Config, folder: Path) -> Path:
    """The warm-started policy of a configuration, made once a folder."""
    policy = folder / f"policy-{config.environment.name}-{config.seed}"
    if not policy.exists():
        prepare_policy(config, policy, "in one process", lambda progress: None)
    return policy


class InProcess:
    """One run: its trainer, and the engine that plays with the trainer's weights."""

    def __init__(self, config: Config, policy: Path) -> None:
        torch.set_num_threads(1)
        self._config, self._environment = config, environment_of(config)
        self._chat = load_chat(policy)
        rules, self._lanes = config.engine, config.engine.max_contexts
        model = load_policy(policy, config.policy.dtype, "cpu")
        temperature = config.sampling.temperature
        learner = config.learner
        self._trainer = Trainer(
            model,
            learner,
            temperature,
            config.seed,
            max_staleness=0,
            strategy_temperature=config.sampling.strategy_temperature,
        )
        served = Model.load(
            policy, lanes=self._lanes, max_tokens=rules.max_tokens, arithmetic=rules.arithmetic
        )
        self._scheduler, self._rivals = Scheduler(served), dict[int, Scheduler]()
        self.league = League(config.population, self._environment.facts)
        self._tasks = Matchmaker(
            TaskStream(self._environment, config.seed).task,
            self._environment,
            self.league,
            config.population,
            seed=config.seed,
            groups_per_step=config.admission.groups_per_step,
        )
        self._num_sets = 0
        self._publish(served.weights)

    @property
    def model(self) -> PreTrainedModel:
        """The trainer's."""
        return self._trainer.model

    def train(self, look: Look = lambda groups: None) -> list[list[float]]:
        """All steps; each one's mean return per unit of every episode.

        Args:
            look: is shown each batch before it is trained.
        """
        return [self._step(step, look) for step in range(self._config.learner.steps)]

    def evaluate(self, split: Split, num_trials: int, *, swap: bool = False) -> Score:
        """The final set of a split, as a whole run plays it."""
        episodes = self._config.evaluation.episodes
        rules = rules_of(self._config, self._environment, self._chat, episodes)
        runs: list[Run] = []
        self._num_sets += 1
        for number, task in enumerate(
            evaluation_tasks(self._environment, split, num_trials, FINAL_SEED)
        ):
            other = swapped(task, self._environment, split) if swap else None
            name = f"e{self._num_sets}.{number}"
            runs.append(
                begin_trial(self._environment, task, 0, rules, self._chat, name=name, swap=other)
            )
        return score(self._play(runs), self._environment)

    def _step(self, step: int, look: Look) -> list[float]:
        """Play one batch with the weights there are, and train on it."""
        size = self._config.admission.trials_per_group
        count = self._config.admission.groups_per_step
        numbers = range(step * count, (step + 1) * count)
        trials = self._play(self._begin(step, numbers, size))
        parts = [tuple(trials[place * size : (place + 1) * size]) for place in range(count)]
        groups = [Group(number, step, part) for number, part in zip(numbers, parts, strict=True)]
        look(groups)
        self._trainer.step(training_sequences(groups, self._config))
        model = self._trainer.model
        weights = as_weights(
            model.state_dict().items(),
            self._scheduler.architecture,
            "trainer",
            self._scheduler.arithmetic,
        )
        self._scheduler.swap(self._trainer.version, weights)
        self.league.trained(groups)
        self._publish(weights)
        return score(trials, self._environment).return_by_episode

    def _publish(self, weights: Weights) -> None:
        """Hold the newest version where it is a rival, and those alone that are."""
        self.league.published(self._trainer.version)
        versions = self.league.rivals()
        if self._trainer.version in versions:
            own, tokens = self._scheduler, self._config.engine.max_tokens
            like = {"lanes": self._lanes, "max_tokens": tokens, "arithmetic": own.arithmetic}
            held = Scheduler(Model(own.architecture, weights, **like))
            self._rivals[self._trainer.version] = held
        self._rivals = {version: self._rivals[version] for version in versions}

    def _begin(self, step: int, numbers: range, size: int) -> list[Run]:
        """The trials of some groups, group by group, under the horizon of the step."""
        episodes = self._config.trial.episodes
        rules = rules_of(self._config, self._environment, self._chat, episodes)
        played = horizon(self._config.curriculum, step, episodes)
        rules = rules.under(self._environment, played.num_episodes, played.max_turns)
        tasks = ((number, self._tasks.task(number)) for number in numbers)
        return [
            begin_trial(self._environment, task, index, rules, self._chat, name=f"{number}.{index}")
            for number, task in tasks
            for index in range(size)
        ]

    def _play(self, runs: Sequence[Run]) -> list[Trial]:
        """Play trials, as many at once as there are lanes."""
        waiting, playing = list(reversed(runs)), dict[str, Run]()
        schedulers = [self._scheduler, *self._rivals.values()]
        while waiting or playing:
            while waiting and len(playing) < self._lanes:
                self._ask(waiting.pop(), playing)
            for scheduler in schedulers:
                for context, completion in scheduler.advance():
                    run = playing.pop(context)
                    run.receive(completion)
                    self._ask(run, playing)
        return [run.trial() for run in runs]

    def _ask(self, run: Run, playing: dict[str, Run]) -> None:
        """Submit a trial's next prompt, or let go of a trial that is over."""
        prompt = run.next_prompt()
        if prompt is not None:
            is_own = prompt.rival is None
            (self._scheduler if is_own else self._rivals[prompt.rival]).submit(prompt)
            playing[prompt.context] = run
            return
        for context in run.contexts():
            for scheduler in (self._scheduler, *self._rivals.values()):
                scheduler.release(context)
