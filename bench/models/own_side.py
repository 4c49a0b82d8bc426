"""Time the embedded engine and our trainer, for `bench.models.trl_comparison`."""

import time
from pathlib import Path

import numpy as np
import torch

from mage_async.assembly import environment_of, trial_config_of
from mage_async.completion import Prompt, Sampling
from mage_async.config import config_file
from mage_async.config.schema import Config, Learner, Lora
from mage_async.inference.chat_files import load_chat
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler
from mage_async.inference.weights import as_weights
from mage_async.learning.corrections import NoCorrection
from mage_async.learning.lora import add_adapters, merged_tensors, trained_tensors
from mage_async.learning.packing import SampledTokens, TrainingSequence
from mage_async.learning.trainer import Trainer
from mage_async.policy.load import load_policy
from mage_async.tasks.task_stream import TaskStream
from mage_async.trials.duels import begin_trial
from mage_async.trials.trial_run import TrialStart

GROUPS, GROUP_SIZE, RATE = 4, 8, 1e-4
"""Groups of a batch, completions of a group, and learning rate, on both sides."""
BATCH = GROUPS * GROUP_SIZE
ADAPTERS = Lora(rank=16, alpha=32.0)


def first_prompt(model: Path) -> np.ndarray:
    """Return the tokens of the first prompt of a trial of boxes: int32 [T]."""
    config = config_file.load(config_file.find("smollm2_boxes"), [f"policy.source={model}"])
    environment, chat = environment_of(config), load_chat(model)
    rules = trial_config_of(config, environment, chat, config.trial.episodes)
    task = TaskStream(environment, config.seed).task(0)
    prompt = begin_trial(TrialStart(environment, task, 0, rules, chat, name="0")).next_prompt()
    assert prompt is not None
    return prompt.tokens


class Ours:
    """Sample with the embedded engine and train with `Trainer`, both timed.

    Args:
        model: Directory of the model.
        prompt: Tokens of the prompt, the same for all completions: int32 [T].
        num_drawn: Number of tokens of a completion.
    """

    def __init__(self, model: Path, prompt: np.ndarray, num_drawn: int) -> None:
        policy = load_policy(model, "float32", "cpu")
        add_adapters(policy, ADAPTERS, 0)
        length = len(prompt) + num_drawn
        rules = Learner(
            minibatches=1,
            learning_rate=RATE,
            correction=NoCorrection(),
            max_tokens_per_microbatch=GROUP_SIZE * length,
            shared_opening=True,
        )
        self.trainer = Trainer(policy, Config(learner=rules))
        self._engine = Scheduler(Model.load(model, slots=BATCH, max_tokens=length))
        self._prompt, self._num_drawn = prompt, num_drawn

    def sample(self) -> float:
        """Sample a batch with the present adapters; return the seconds."""
        version, engine = self.trainer.version, self._engine
        named = merged_tensors(self.trainer.model)
        served = engine.model
        engine.swap(version, as_weights(named, served.architecture, "trainer", served.arithmetic))
        began, sampling = time.monotonic(), Sampling(max_tokens=self._num_drawn)
        for number in range(BATCH):
            seed = version * BATCH + number
            engine.submit(Prompt(f"{version}.{number}", self._prompt, sampling, seed))
        drawn = 0
        while not engine.is_idle:
            drawn += sum(len(completion.tokens) for _, completion in engine.advance())
        took_s = time.monotonic() - began
        for number in range(BATCH):
            engine.release(f"{version}.{number}")
        assert drawn == BATCH * self._num_drawn
        return took_s

    def train(
        self, batch: list[TrainingSequence], adapters: dict[str, torch.Tensor]
    ) -> dict[str, float]:
        """Make an update from given adapters; return its seconds and its gradient's norm."""
        for name, tensor in trained_tensors(self.trainer.model).items():
            tensor.copy_(adapters[name])
        began = time.monotonic()
        norm = self.trainer.step(batch)["grad_norm"]
        return {"trained_s": time.monotonic() - began, "norm": norm}


def sequenced(prompt: list[int], completion: list[int], advantage: float) -> TrainingSequence:
    """Return a completion as a sequence for our trainer."""
    count = len(completion)
    # Versions, episodes, kinds and provenances of the tokens, which this update does not use.
    zeros = [np.zeros(count, np.int32) for _ in range(5)]
    return TrainingSequence(
        np.array(prompt + completion, np.int32),
        np.arange(len(prompt), len(prompt) + count),
        SampledTokens(np.zeros(count, np.float32), *zeros),
        np.array([count]),  # one turn
        torch.tensor([advantage]),
    )
