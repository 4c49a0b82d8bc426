"""Time TRL's GRPOTrainer and record its batches, for `bench.models.trl_comparison`."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PREFIX = "base_model.model."
"""Prefix that peft's wrapper adds to the name of every weight."""

Ended = Callable[[dict[str, float], list[tuple[list[int], list[int], float]], dict[str, Any]], None]
"""Told after every step: seconds and the gradient's norm; prompt, completion and advantage of each
completion; the adapters that the step began with.
"""


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that measures the seconds of `generate`, and of all that precedes training."""

    sampled_s = prepared_s = norm = 0.0
    batch: list[tuple[list[int], list[int], float]]

    def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
        began = time.monotonic()
        found = super()._generate_single_turn(*given, **named)
        self.sampled_s = time.monotonic() - began
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.monotonic()
        found = super()._generate_and_score_completions(inputs)
        columns = (found["prompt_ids"], found["completion_ids"], found["advantages"])
        self.batch = list(zip(*(column.tolist() for column in columns), strict=True))
        self.prepared_s = time.monotonic() - began
        return found


class Clock(TrainerCallback):
    """Measure each step, and report its times and its batch."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self.trainer: TimedTrainer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Keep the adapters, and start the clock."""
        named = self.trainer.model.named_parameters()
        self._adapters = {
            name.removeprefix(PREFIX): weight.detach().clone()
            for name, weight in named
            if weight.requires_grad
        }
        self._began = time.monotonic()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Record the gradient's norm before clipping, which the clipping function returned."""
        self._norm = float(self.trainer.norm)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock. The time of training is the step's without generation and scores."""
        trainer = self.trainer
        trained_s = time.monotonic() - self._began - trainer.prepared_s
        found = {"sampled_s": trainer.sampled_s, "trained_s": trained_s, "norm": self._norm}
        self._ended(found, trainer.batch, self._adapters)


class TrlSide:
    """Train GRPO on one prompt, with completions of a fixed number of tokens and random rewards.

    Args:
        model: Directory of the model.
        prompt: Tokens of the prompt.
        num_drawn: Number of tokens of a completion.
        groups: Number of groups of a batch, and of completions of a group.
        rate: Learning rate.
        adapters: Rank, scale and targets of the LoRA adapters.
    """

    def __init__(
        self,
        model: Path,
        prompt: list[int],
        num_drawn: int,
        groups: tuple[int, int],
        rate: float,
        adapters: dict[str, Any],
    ) -> None:
        self._model, self._num_drawn, self._groups, self._rate = model, num_drawn, groups, rate
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._text = self._tokenizer.decode(prompt)
        assert self._tokenizer(self._text)["input_ids"] == prompt
        self._lora = LoraConfig(
            r=adapters["rank"],
            lora_alpha=adapters["alpha"],
            target_modules=adapters["targets"],
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )

    def run(self, num_steps: int, folder: Path, ended: Ended) -> None:
        """Train with one update in each step."""
        num_groups, _ = self._groups
        clock = Clock(ended)
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32),
            reward_funcs=_rewards(random.Random(0)),
            args=self._settings(num_steps, folder),
            train_dataset=Dataset.from_dict({"prompt": [self._text] * num_groups * num_steps}),
            processing_class=self._tokenizer,
            peft_config=self._lora,
            callbacks=[clock],
        )
        clock.trainer = trainer
        clip = trainer.accelerator.clip_grad_norm_

        def clipped(*given: Any, **named: Any) -> Any:
            trainer.norm = clip(*given, **named)
            return trainer.norm

        trainer.accelerator.clip_grad_norm_ = clipped
        trainer.train()

    def _settings(self, num_steps: int, folder: Path) -> GRPOConfig:
        num_groups, size = self._groups
        return GRPOConfig(
            output_dir=str(folder),
            max_steps=num_steps,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=num_groups,
            num_generations=size,
            max_completion_length=self._num_drawn,
            generation_kwargs={"min_new_tokens": self._num_drawn},  # no completion ends early
            learning_rate=self._rate,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            beta=0.0,  # no KL term
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )


def _rewards(source: random.Random) -> Callable[..., Sequence[float]]:
    def rewards(completions: Sequence[str], **_: Any) -> list[float]:
        return [source.random() for _ in completions]

    return rewards
