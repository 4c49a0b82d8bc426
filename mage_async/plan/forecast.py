"""Forecast how long a run will take, from the measured seconds of a few turns and one update."""

from dataclasses import dataclass

import msgspec

from mage_async.config.defaults import ON_CORES
from mage_async.config.schema import Config, FromBest, FromData, FromWinStay
from mage_async.methods.method import overriding
from mage_async.policy.demonstrations import FURTHER_S
from mage_async.results.progress import time_in_words
from mage_async.trials.win_stay import NUM_PLAYED

MAX_STEP_S = 300.0
"""Seconds of a step above which a batch is made smaller."""
FEWEST_GROUPS = 2
"""A batch is not made smaller than this number of groups, so that it has more than one task."""
NUM_CURVE_SETS = 2
"""Number of sets in an evaluation while training: held-out and training tasks."""
STARTING = 1.5
"""Time from the start of the processes to the first turn, as a multiple of `Pace.load_s`. It is
above 1 because actors load the weights only after the learner has loaded and published them."""


class Pace(msgspec.Struct, frozen=True):
    """Hold times in seconds that were measured on this machine, and the amounts of work that were
    measured.
    """

    load_s: float
    """Seconds from the start of a process until the policy can play and be trained."""
    num_contexts: int
    """Number of trials that were played at once."""
    opening_s: float
    """Seconds of the first turn of these trials together; it includes the prefill of the rules."""
    turn_s: float
    """Seconds of each later turn of these trials together."""
    trial_turns: float
    """Mean number of turns of a trial."""
    opening_tokens: int
    """Number of tokens that all trials begin with and that a micro-batch computes once; 0 if
    `learner.shared_opening` is off."""
    trial_tokens: int
    """Number of tokens of a trial, the opening included."""
    update_s: float
    """Seconds of one update on `num_trained` trials: forward, backward, and the optimizer."""
    forward_s: float
    """Seconds of the forward pass of that update alone."""
    num_trained: int
    """Number of trials in the update that was measured."""
    scripted_s: float
    """Seconds of a trial in which a script or random play acts, without a model."""

    def trial_s(self, length: float = 1.0) -> float:
        """Return the seconds of an engine per trial, if it plays `num_contexts` trials at once.

        Args:
            length: Number of episodes of a trial, as a multiple of those of the measured trials.
        """
        num_turns = max(1.0, length * self.trial_turns)
        return (self.opening_s + (num_turns - 1) * self.turn_s) / self.num_contexts

    def _in_updates(self, num_trials: float, num_microbatches: float) -> float:
        """Return the cost of training on `num_trials` trials, in units of the measured update.

        Cost is proportional to tokens. The tokens that all trials begin with (`opening_tokens`) are
        computed once per micro-batch; the measured update was one micro-batch.
        """
        own = self.trial_tokens - self.opening_tokens
        measured = self.opening_tokens + self.num_trained * own
        return (num_microbatches * self.opening_tokens + num_trials * own) / measured

    def trials_of_microbatch(self, config: Config) -> int:
        """Return the number of trials in a micro-batch that is not the last of its minibatch."""
        learner, num_trials = config.learner, trials_of_step(config)
        of_minibatch = -(-num_trials // learner.minibatches)  # rounded up
        if not learner.max_tokens_per_microbatch:
            return of_minibatch
        # The tokens that all trials begin with count once against a micro-batch's limit of tokens.
        left = learner.max_tokens_per_microbatch - self.opening_tokens
        own = self.trial_tokens - self.opening_tokens
        return min(of_minibatch, max(1, left // max(1, own)))

    def step_train_s(self, config: Config) -> float:
        """Return the seconds in which the learner trains on a batch."""
        learner, num_trials = config.learner, trials_of_step(config)
        trials_of_microbatch = self.trials_of_microbatch(config)
        num_minibatches = min(learner.minibatches, num_trials)
        sizes = [len(range(i, num_trials, num_minibatches)) for i in range(num_minibatches)]
        # -(-a // b) is a / b, rounded up.
        num_microbatches = sum(-(-size // trials_of_microbatch) for size in sizes)
        seconds_per_update = self.update_s + learner.repeated_forwards * self.forward_s
        return self._in_updates(num_trials, num_microbatches) * seconds_per_update


def seconds_text(number: float) -> str:
    """Return a time as text; below 10 seconds with a fraction: 1.27 -> "1.3 s"."""
    return f"{number:.2g} s" if number < 9.95 else time_in_words(number)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Hold the seconds of a run, and of its parts."""

    warm_start_s: float
    first_step_s: float
    """Seconds from the start of the processes to the end of the first step, warm start included; to
    the beginning of the final evaluation if there are no steps."""
    step_s: float
    """Seconds of each later step."""
    play_s: float
    """Seconds that one engine would need to play the trials of a step."""
    train_s: float
    """Seconds in which the learner trains on the trials of a step."""
    run_s: float
    """Seconds of the whole run with its final evaluation."""

    def sentence(self, config: Config) -> str:
        """Return the forecast as a sentence for people."""
        run, first, step = map(seconds_text, (self.run_s, self.first_step_s, self.step_s))
        warm, play, train = map(seconds_text, (self.warm_start_s, self.play_s, self.train_s))
        with_warm = f", {warm} of it the warm start" if self.warm_start_s else ""
        if not config.learner.steps:
            return f"nothing is trained; the final evaluation ends after {run}{with_warm}"
        return (
            f"the first step is expected after {first}{with_warm}, then one every {step} ({play} "
            f"of play, {train} of training); {config.learner.steps} steps and the final evaluation "
            f"take about {run}"
        )


def trials_of_step(config: Config) -> int:
    """Return the number of trials in the batch of a step."""
    return config.admission.groups_per_step * config.admission.trials_per_group


def forecast(config: Config, pace: Pace, *, num_actors: int, num_cores: int) -> Forecast:
    """Compute the seconds of a run whose processes compute on `num_cores` cores.

    Actors, evaluator and learner are assumed to share the cores evenly, and to wait for nothing
    else. So a step takes all its work divided by the number of cores, but at least as long as the
    actors play or the learner trains.
    """
    play_s, train_s = trials_of_step(config) * pace.trial_s(), pace.step_train_s(config)
    evaluation, every = config.evaluation, config.evaluation.every
    # The time of an evaluation while training, spread over the `every` steps between two of them.
    evaluated_s = pace.trial_s(evaluation.episodes / config.trial.episodes)
    curve_s = NUM_CURVE_SETS * evaluation.trials * evaluated_s / every if every else 0.0
    players = min(num_actors, num_cores)  # actors that can play at the same time
    step_s = max((play_s + train_s + curve_s) / num_cores, play_s / players, train_s)
    # With a bound of 0, a group that is granted while a batch is trained would be too old for the
    # next step. So actors wait for each version.
    if config.admission.nominal_bound == 0 and config.admission.rule != "unbounded":
        step_s = max(step_s, play_s / players + train_s)
    warm_s = _warm_start_s(config, pace)
    first_s = STARTING * pace.load_s + warm_s
    if config.learner.steps:
        # Nothing is trained while the trials of the first step are played.
        first_s += play_s / players + train_s
    num_sets = len(final_sets(config, evaluation.episodes))
    final_s = num_sets * evaluation.final_trials * evaluated_s
    run_s = first_s + max(0, config.learner.steps - 1) * step_s + final_s
    return Forecast(warm_s, first_s, step_s, play_s, train_s, run_s)


def final_sets(config: Config, num_episodes: int) -> tuple[str, ...]:
    """Return the names of the sets of a final evaluation whose trials have `num_episodes` episodes.

    They are training and held-out tasks, the two controls if there are earlier episodes whose
    memory they could change, and held-out tasks without guidance if a method gives any.
    """
    controls = ("heldout_blind", "heldout_swapped") if num_episodes > 1 else ()
    is_guided = bool(overriding(config, "evaluation_guidance"))
    return ("train", "heldout", *controls, *("heldout_unguided",) * is_guided)


def idle_cores(config: Config, expected: Forecast, *, num_actors: int, num_cores: int) -> str:
    """Return a sentence on how to use cores that a run would leave idle; "" if it leaves none, or
    too few.

    The training of a step and the play of its trials overlap, so only the slower one is worth
    more cores.
    """
    engine, learner = config.engine, config.learner
    num_engines = num_actors + 1  # the evaluator has an engine of its own
    idle = num_cores - learner.threads * learner.ranks - num_engines * engine.threads
    if idle < 1 or not learner.steps:
        return ""
    if expected.train_s >= expected.play_s / num_actors:
        if idle < learner.ranks:  # there is no further core for each rank
            return ""
        cure = f"learner.threads = {learner.threads + idle // learner.ranks} shortens the training"
    elif idle >= engine.threads:
        cure = f"--actors {num_actors + idle // engine.threads} shortens the play"
    elif idle >= num_engines:
        cure = f"engine.threads = {engine.threads + idle // num_engines} shortens the play"
    else:  # too few for one more actor, and for one more thread of each engine
        return ""
    return f"{idle} of {num_cores} cores stay idle; {cure}, the slower part of a step"


def _warm_start_s(config: Config, pace: Pace) -> float:
    """Return the seconds of a warm start that is not cached.

    A warm start ends when its gate opens: a ratio of losses that `warm_start.py` waits for. The
    gate of "win_stay" is assumed to stay shut, and that of any other warm start to open at the
    first check.
    """
    warm = config.warm_start
    if warm is None:
        return 0.0
    num_steps, play_s = warm.steps, warm.trials * pace.scripted_s
    match warm:
        case FromWinStay():
            num_steps += warm.max_stable_steps
            play_s += NUM_PLAYED * pace.scripted_s
            play_s += min(FURTHER_S, warm.further_trials * pace.scripted_s)
        case FromBest():  # the model itself plays
            play_s = warm.trials * pace.trial_s()
        case FromData():
            play_s = 0.0
    return num_steps * warm.batch_size / pace.num_trained * pace.update_s + play_s


def smaller_batch(
    config: Config, pace: Pace, *, num_actors: int, num_cores: int
) -> tuple[Config, str]:
    """Lower `admission.groups_per_step` if a step would take longer than `MAX_STEP_S`.

    Only a batch of the default size is changed. For any other size, the note names the two keys
    that shorten a step most.

    Returns:
        The configuration, and a note for people; "" if a step is short enough.
    """
    step_s = forecast(config, pace, num_actors=num_actors, num_cores=num_cores).step_s
    if step_s <= MAX_STEP_S or not config.learner.steps:
        return config, ""
    groups = config.admission.groups_per_step
    takes = f"a step of {trials_of_step(config)} trials would take {seconds_text(step_s)} here"
    fewer = max(FEWEST_GROUPS, int(groups * MAX_STEP_S / step_s))
    if groups == ON_CORES["admission"]["groups_per_step"] and fewer < groups:
        admission = msgspec.structs.replace(config.admission, groups_per_step=fewer)
        smaller = msgspec.structs.replace(config, admission=admission)
        return smaller, f"{takes}, so admission.groups_per_step is lowered to {fewer}"
    return config, (
        f"{takes}; to shorten it, lower admission.groups_per_step, or let trials have fewer turns "
        f"(trial.episodes = {config.trial.episodes}, the class's max_turns)"
    )
