"""A taskset of verifiers with turns: a hidden number is guessed. Runs in verifiers' own Python."""

import os
import random

import verifiers.v1 as vf

__all__ = ["GuessingEnv", "GuessingTaskset"]
TURNS = 6


class GuessingData(vf.TaskData):
    number: int


class GuessingTask(vf.Task[GuessingData, vf.State, vf.TaskConfig]):
    pass


class GuessingConfig(vf.TasksetConfig):
    highest: int = 20


class GuessingTaskset(vf.Taskset[GuessingTask, GuessingConfig]):
    def load(self):
        for index in range(20):
            number = random.Random(index).randint(1, self.config.highest)
            prompt = f"Guess a number from 1 to {self.config.highest}."
            data = GuessingData(prompt=prompt, system_prompt="Be brief.", number=number)
            yield GuessingTask(data, self.config.task)


class GuessingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def run(self, task: GuessingTask, agents: vf.Agents) -> None:
        reward = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for turn in range(TURNS):
                guess = segment.last_reply
                if guess == "exit":
                    os._exit(3)
                if guess == "raise":
                    raise ValueError("no number")
                if guess == str(task.data.number):
                    reward = 1.0 / (turn + 1)
                    break
                is_low = guess.isdigit() and int(guess) < task.data.number
                segment = await interaction.turn("higher" if is_low else "lower")
        interaction.trace.record_reward("found", reward, 1.0)
