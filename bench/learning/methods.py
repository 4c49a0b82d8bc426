"""Train published methods and their controls, and compare the returns of an episode.

    python -m bench.learning.methods [--run-dir DIR] [--seeds 0 1 2] [--arms sge] [--only-report]

An arm is a configuration that is trained; it differs from its control in one method
(`mage train --method`), or in one key of the method. Both have the same number of
steps and trials, and train on-policy in one process (`mage_async/algorithm.py`). Runs with the same
seed share tasks, evaluation and, if their prompts have the same form, the warm start; so
differences are taken seed by seed.

    arms                 environment                control
    rema, mage           the quickstart's           GRPO, which trains on one episode, as ReMA does
    rema_final, …        the winner of 5 rounds     the same; only the last round of an episode pays
    stepagent_*          small rooms of Sokoban     RL with the environment's rewards alone
    scaling_inter_far    larger rooms of Sokoban    the same horizon in all steps
    metacure*            Scout                      one adapter, paid the last episode's reward
    sac_*, grpo_*        goals on a grid            SAC-GLAM without hindsight
    kuhn_*               Kuhn poker                 MAGE: one opponent a group, a global anchor
    graph_memory_*       boxes with similar codes   no memory across tasks; episode 1 is compared
    all others           the quickstart's           the quickstart

A run whose result is in the folder is not run again.

**ReMA, GRPO and MAGE** (`--arms grpo rema mage grpo_final rema_final mage_final`) are the presets
as they are; MAGE is `mage_paper`. In a step GRPO and ReMA play 54 groups of one episode, MAGE 18
groups of three, so all have the same budget of turns with the environment. A win ends a trial of
MAGE in training, so it uses less of the budget; the turns are reported, and all arms are evaluated
at several steps, so that equal turns can be read off. After a third of the steps GRPO and ReMA have
played as many trials as MAGE in all. Evaluations have three episodes of a task. MAGE remembers the
earlier ones. GRPO and ReMA do not: theirs are independent tries, and the last is one like the
first. Compared are the first episode, the last one, and the best of the three, for which more tries
are enough without any memory.

**MAGE's ablations in Kuhn poker** (`--arms kuhn_global kuhn_local kuhn_mixed_global
kuhn_mixed_local kuhn_skewed`) train `mage_paper` over `kuhn.toml`. "local": only turns of the same
episode are the same state. "mixed": a group's trials meet different opponents and are compared all
the same. "skewed": nine in ten groups meet three of the twelve opponents, which bet alike.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bench.lib.arms import Job, arguments, results, run_missing
from bench.lib.baseline import ROOT, write_baseline
from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.environments.environment import Split
from mage_async.results.intervals import interval, paired
from mage_async.tasks.matchmaking import Draw, Matchmaker
from mage_async.trajectory import Group, Kind

Gain = tuple[float, float]
"""Mean over seeds, and the half-width of its 95 % interval."""
STEPS, TRIALS = 20, 512
"""Steps of a run: a third of the quickstart's, so that speeds of learning are compared. Trials of
an evaluation."""
ROOM = "engine.max_tokens=240"
"""Room of a context, the same for all arms: some methods write more into it than others."""
MEASURES = {
    "first_episode": ("return_by_episode", 0),
    "last_episode": ("return_by_episode", -1),
    "best_of_tries": ("best_within", -1),
    "won_in_tries": ("won_within", -1),
}
"""Key of a score, and index of the episode, by name: the returns of the first and of the last
episode, the mean over trials of their best return, and the share of trials that win any episode."""
# Changes of single arms.
REFLECTIONS = 'trial.memory="history_and_reflection"'


# ReMA, GRPO and MAGE. The changes leave all keys of the three presets alone.
EPISODES = ("evaluation.episodes=3", "engine.max_tokens=400", "learner.steps=90")
WATCHED = (30, 45, 60, 75)
"""Steps after which these arms are evaluated besides; after 30 of 90 GRPO and ReMA have played as
many trials as MAGE in all."""
SINGLE = (*EPISODES, "admission.groups_per_step=54", "engine.max_contexts=240")
FINAL = (
    *("environment.name=biased_rps", "environment.options={rounds=5}"),
    *("warm_start.gate=1.0", "warm_start.steps=400", "warm_start.max_steps=400"),
)
"""Rock-paper-scissors against an opponent with a favourite move; winning three of five rounds pays
1 at the end of the episode. Random play earns 0.21; a script that counts the opponent's moves 0.60,
and 0.78 if it also counts those of earlier episodes. Its noise keeps the ratio that a warm start's
gate asks for at 0.86 after 400 steps, so there is no gate."""

KUHN_STEPS = ("learner.steps=120", "engine.max_tokens=320")
MIXED = (
    *KUHN_STEPS,
    "population.mixed_groups=true",
    'advantage.baseline=["group", "seat", "kind", "episode"]',
)
"""Trials of a group meet about six opponents, and share a mean over all of them. With the preset's
baseline, which has the member, most of eight trials would be compared with none."""
LOCAL = "advantage.anchor=local"


class Skewed(Matchmaker):
    """Let nine in ten groups meet the first three of the training opponents, which bet with the
    jack alone, and the others any.
    """

    def choose(self, names: Sequence[str], draw: Draw) -> str:
        """Choose uniformly, of the first three names or of all."""
        return draw.source.choice(names[:3] if draw.source.random() < 0.9 else names)


SOKOBAN = (
    "environment.name=sokoban",
    "environment.options={size=5,boxes=1,turns=8,steps_per_turn=1,shortest=2,longest=5,rooms=1024}",
    *("trial.episodes=1", "evaluation.episodes=1", "credit.kind=single_episode"),
    *("warm_start.episodes=1", "warm_start.steps=200", "warm_start.max_steps=200"),
    *("warm_start.trials=800", "warm_start.batch_size=16", "warm_start.learning_rate=0.004"),
    *("warm_start.gate=1.0", "engine.max_tokens=400", "learner.steps=100"),
    *("admission.groups_per_step=12", "admission.trials_per_group=6"),
    *("learner.minibatches=8", "learner.learning_rate=0.003"),
)
"""Sokoban with one box, one step a turn, and a reward of 11 if the box comes onto its target. The
policy is evaluated in held-out rooms. The warm start clones 800 trials of scripts that make between
no and many random steps.
"""

FAR = (
    *SOKOBAN,
    "environment.options={size=5,boxes=1,turns=12,steps_per_turn=1,shortest=2,longest=9,rooms=1024}",
    *("engine.max_tokens=600", "learner.steps=20"),
)
"""The same with rooms that take up to nine steps, and twelve turns, so that the horizon matters."""
STAGES = (
    "methods.scaling_inter.turns=[4, 8, 12]",
    "methods.scaling_inter.steps=7",
    "methods.scaling_inter.episodes=[1]",
)
"""Three stages of ScalingInter with a growing number of turns, each a third of training, as
AgentGym-RL has with 10, 20 and 30 turns. Over half of the rooms can be solved in four turns.
"""

GRID_ALONE = (
    "environment.name=grid",
    "environment.options={size=6,turns=10,nearest=8}",
    *("evaluation.episodes=1", "warm_start=none", "engine.max_contexts=64", "learner.steps=40"),
    *("admission.groups_per_step=8", "admission.trials_per_group=8"),
    *("learner.learning_rate=0.003", "learner.final_learning_rate=0.001"),
    *("learner.warmup_steps=1", "learner.minibatches=8"),
)
GRID = (
    *GRID_ALONE,
    *(
        "methods.sac_glam.batch=32",
        "methods.sac_glam.critic_rate=0.005",
        "methods.sac_glam.target_rate=0.1",
    ),
)
"""Four far goals on a grid. The policy begins with random weights. A random walk reaches its goal
in 0.7 % of trials, but a policy that only goes in two directions reaches a quarter of the goals.
The policy is evaluated on the goals that it trains on."""
AROUND = (
    "environment.options={size=9,turns=10,nearest=5,start='middle'}",
    "learner.steps=200",
)
"""32 goals on all sides of the middle; no two directions lead to more than a few of them."""
# The settings of all arms that play boxes.
BOXES = (
    *("environment.name=boxes", "warm_start.trials=800"),
    *("credit.kind=cumulative_paper", "warm_start.gate=1.0"),
    *("warm_start.steps=1000", "warm_start.max_steps=1000"),
    *("admission.groups_per_step=6", "learner.steps=10"),
)
ALIKE = (*BOXES, "environment.options={near='left-left-right-left',differ=1}")
"""Four boxes whose codes, held-out ones too, differ from one given code in at most one place. The
warm start clones trials with any codes, so the policy can use earlier episodes and knows nothing of
these codes. All episodes are rewarded, so RL without a memory can learn the likely codes in its
weights. The returns after each step show which is faster.
"""
TOLD = "methods.graph_memory.strategies=4"
"""Number of strategies that a trial is told: one for each box."""
TOLD_BOXES = (*BOXES, TOLD)
"""Warm start of these arms. Half of the cloned trials have strategies in their prompts, so every
policy can read strategies, and the arms differ in the memory alone."""
JOINTLY = "methods.graph_memory.told=jointly"
"""Tell all strategies at once, which share one change of return; the preset tells a trial one."""
FAST = "methods.graph_memory.rate=20"
"""A learning rate of the memory at which a change of return outweighs the weight of a new edge
after one or two groups."""
SHUFFLED = "methods.graph_memory.rewards=shuffled"
"""A control: the memory learns from the rewards of other actions of the batch."""
SCOUT = (
    *("environment.name=scout", "learner.entropy_ceiling=2.0", "learner.learning_rate=0.003"),
    *("warm_start.steps=300", "warm_start.gate=0.6", "warm_start.max_steps=600"),
)
"""Scout: probing costs two rewards and pays in later episodes only. The learning rate is one for
adapters."""
INFORMED = (
    *SCOUT,
    "methods.metacure.information_bonus=1.0",
    "methods.metacure.exploration_share=0.0",
    "credit.kind=final_only",
)
"""The exploring policy earns 1 per nat of information, and nothing of its own episode's reward."""
ONE_ADAPTER = ("policy.lora.rank=32", "policy.lora.alpha=64", "advantage.scale=[]")
"""One adapter with as many weights as MetaCURE's two adapters of half the rank."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A configuration to train, with a method and some keys changed."""

    method: str | None = None
    changes: tuple[str, ...] = ()
    """Keys with their values, as in `--set`."""
    control: str = "quickstart"
    """Name of the arm it is compared with; a control has its own name."""
    warm_start: str = "plain"
    """Name of the warm-started policy. Arms with the same name share it."""
    split: Split = "heldout"
    """Tasks that it is evaluated on."""
    warm_start_changes: tuple[str, ...] | None = None
    """Keys with which the warm start is made; None: `changes`."""
    episode: int = -1
    """Index of the episode whose returns are compared."""
    evaluated_after: tuple[int, ...] = ()
    """Steps after which it is evaluated, besides the last one."""
    config: str = "quickstart"
    """Name of the configuration that is changed, a file of `configs/`."""
    blind: bool = False
    """Whether it is evaluated without memory of earlier episodes, which are independent tries."""


ALIKE_ARM = Arm(
    None,
    ALIKE,
    control="alike",
    warm_start="told_boxes",
    warm_start_changes=TOLD_BOXES,
    episode=0,
    evaluated_after=(1, 2, 3, 4, 6, 8),
)
GRPO_ARM = Arm("grpo", SINGLE, "grpo", "one episode", evaluated_after=WATCHED, blind=True)
REMA_ARM = replace(GRPO_ARM, method="rema", warm_start="planned")
MAGE_ARM = Arm("mage_paper", EPISODES, "grpo", "reflections", evaluated_after=WATCHED)
KUHN_ARM = Arm("mage_paper", KUHN_STEPS, "kuhn_global", "kuhn", config="kuhn")
ARMS = {
    "quickstart": Arm(),
    "scaling_inter": Arm(
        "scaling_inter",
        (
            "methods.scaling_inter.turns=[2, 3, 4]",
            "methods.scaling_inter.episodes=[1, 2, 3]",
            "methods.scaling_inter.steps=5",
        ),
    ),
    # The baseline was measured when the preset had 0.1.
    "information_bonus": Arm("information_bonus", ("methods.metacure.information_bonus=0.1",)),
    "graph_memory": Arm("graph_memory", (JOINTLY,), warm_start="told"),
    "sge": Arm(
        "sge", ('trial.strategy="episode"', "methods.sge.reflected=0"), warm_start="strategies"
    ),
    "reflections": Arm(None, (REFLECTIONS,), warm_start="reflections"),
    "grpo": GRPO_ARM,
    "rema": REMA_ARM,
    "mage": MAGE_ARM,
    "grpo_final": replace(GRPO_ARM, changes=(*SINGLE, *FINAL), control="grpo_final"),
    "rema_final": replace(REMA_ARM, changes=(*SINGLE, *FINAL), control="grpo_final"),
    "mage_final": replace(MAGE_ARM, changes=(*EPISODES, *FINAL), control="grpo_final"),
    "sokoban": Arm(None, SOKOBAN, control="sokoban", warm_start="sokoban"),
    "stepagent_implicit": Arm(
        "stepagent_implicit",
        (*SOKOBAN, "methods.stepagent.beta=1.0", "methods.stepagent.weight=5.0"),
        control="sokoban",
        warm_start="sokoban",
    ),
    "far": Arm(None, FAR, control="far", warm_start="far"),
    "scaling_inter_far": Arm("scaling_inter", (*FAR, *STAGES), control="far", warm_start="far"),
    "stepagent_irl": Arm("stepagent_irl", SOKOBAN, control="sokoban", warm_start="sokoban"),
    "scout": Arm(None, (*SCOUT, *ONE_ADAPTER), control="scout", warm_start="scout"),
    "metacure": Arm("metacure", SCOUT, control="scout", warm_start="scout"),
    "metacure_tenth": Arm(
        "metacure",
        (*SCOUT, "methods.metacure.information_bonus=0.1"),
        control="scout",
        warm_start="scout",
    ),
    "metacure_learned": Arm(
        "metacure",
        (*INFORMED, "methods.metacure.inference=learned"),
        control="scout",
        warm_start="scout",
    ),
    "metacure_information": Arm("metacure", INFORMED, control="scout", warm_start="scout"),
    "metacure_share": Arm(
        "metacure",
        (*INFORMED, "methods.metacure.exploration_share=0.5"),
        control="scout",
        warm_start="scout",
    ),
    "sac_glam": Arm("sac_glam", GRID, "sac_without_hindsight", "grid", "train"),
    "sac_without_hindsight": Arm(
        "sac_glam",
        (*GRID, "methods.sac_glam.hindsight=0"),
        "sac_without_hindsight",
        "grid",
        "train",
    ),
    "sac_learned": Arm(
        "sac_glam",
        (*GRID, "methods.sac_glam.hindsight=0", "methods.sac_glam.target_entropy=0.5"),
        "sac_without_hindsight",
        "grid",
        "train",
    ),
    "sac_three_steps": Arm(
        "sac_glam",
        (*GRID, "methods.sac_glam.hindsight=0", "methods.sac_glam.target_steps=3"),
        "sac_without_hindsight",
        "grid",
        "train",
    ),
    "grpo_grid": Arm("grpo", GRID_ALONE, "sac_without_hindsight", "grid", "train"),
    "sac_glam_around": Arm(
        "sac_glam", (*GRID, *AROUND), "sac_around_without_hindsight", "around", "train"
    ),
    "sac_around_without_hindsight": Arm(
        "sac_glam",
        (*GRID, *AROUND, "methods.sac_glam.hindsight=0"),
        "sac_around_without_hindsight",
        "around",
        "train",
    ),
    "grpo_around": Arm(
        "grpo", (*GRID_ALONE, *AROUND), "sac_around_without_hindsight", "around", "train"
    ),
    "kuhn_global": KUHN_ARM,
    "kuhn_local": replace(KUHN_ARM, changes=(*KUHN_STEPS, LOCAL)),
    "kuhn_mixed_global": replace(KUHN_ARM, changes=MIXED),
    "kuhn_mixed_local": replace(KUHN_ARM, changes=(*MIXED, LOCAL), control="kuhn_mixed_global"),
    "kuhn_skewed": replace(
        KUHN_ARM,
        changes=(*KUHN_STEPS, "population.matchmaker=bench.learning.methods:Skewed"),
    ),
    "alike": ALIKE_ARM,
    "graph_memory_alike": replace(
        ALIKE_ARM, method="graph_memory", changes=(*ALIKE, TOLD, JOINTLY)
    ),
    "graph_memory_shuffled": replace(
        ALIKE_ARM, method="graph_memory", changes=(*ALIKE, TOLD, JOINTLY, SHUFFLED)
    ),
    "graph_memory_singly": replace(ALIKE_ARM, method="graph_memory", changes=(*ALIKE, TOLD)),
    "graph_memory_fast": replace(
        ALIKE_ARM, method="graph_memory", changes=(*ALIKE, TOLD, JOINTLY, FAST)
    ),
    "graph_memory_singly_fast": replace(
        ALIKE_ARM, method="graph_memory", changes=(*ALIKE, TOLD, FAST)
    ),
}
BASELINES = {
    "alike": "methods_alike",
    "far": "methods_far",
    "grpo": "methods_rema",
    "grpo_final": "methods_rema",
    "kuhn_global": "methods_kuhn",
    "kuhn_mixed_global": "methods_kuhn",
    "sac_around_without_hindsight": "methods_around",
    "sac_without_hindsight": "methods_grid",
    "scout": "methods_scout",
    "sokoban": "methods_sokoban",
}
"""Baseline that an arm's figures go to, by its control; "methods" for the quickstart's arms. If
`graph_memory_singly` or `graph_memory_fast` was run, the arms of "alike" go to `methods_told`."""


def main() -> int:
    """Run the arms that have no results yet, then report all results."""
    given = arguments(__doc__, "methods", ARMS)
    run_missing(given, run, _prepared)
    return _report(results(given, ARMS), given.seeds)


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train one arm with one seed; return its learning curve and its evaluations."""
    began, policy = time.monotonic(), _prepared(job, folder)
    config, arm = config_of(*job), ARMS[job.arm]
    training, curve, watched = InProcessRun(config, policy), [], {}
    num_turns: list[int] = []
    for step in range(1, config.learner.steps + 1):
        curve.append(training.step(lambda groups: num_turns.append(_num_turns(groups))))
        if step in arm.evaluated_after:
            watched[step] = training.evaluate(arm.split, TRIALS, blind=arm.blind).return_by_episode
    return {
        "curve": curve,
        "turns": sum(num_turns),
        "watched": watched,
        arm.split: msgspec.to_builtins(training.evaluate(arm.split, TRIALS, blind=arm.blind)),
        "wall_s": time.monotonic() - began,
    }


def _num_turns(groups: Sequence[Group]) -> int:
    """Return the number of actions in a batch, which are turns with the environment."""
    turns = (turn for group in groups for trial in group.trials for turn in trial.turns)
    return sum(turn.kind is Kind.ACT for turn in turns)


def _prepared(job: Job, folder: Path) -> Path:
    """Return the directory of the arm's warm-started policy, which is made once."""
    arm = ARMS[job.arm]
    warm = folder / arm.warm_start
    warm.mkdir(parents=True, exist_ok=True)
    changes = arm.changes if arm.warm_start_changes is None else arm.warm_start_changes
    return prepare(_config(arm, changes, job.seed), warm)


def config_of(name: str, seed: int) -> Config:
    """Return the configuration of an arm with a seed."""
    return _config(ARMS[name], ARMS[name].changes, seed)


def _config(arm: Arm, changes: tuple[str, ...], seed: int) -> Config:
    settings = [ROOM, f"learner.steps={STEPS}", *changes, f"seed={seed}"]
    return config_file.load(ROOT / f"configs/{arm.config}.toml", settings, arm.method)


def _report(found: dict[str, dict[int, Any]], seeds: list[int]) -> int:
    """Print the compared returns of each arm, and write each group of arms to its baseline."""
    rows: list[dict[str, Any]] = []
    for name, arm in ARMS.items():
        if not found[name]:
            continue
        measured = {measure: _values(name, measure, found) for measure in MEASURES}
        watched = {step: _watched(step, name, found) for step in map(str, arm.evaluated_after)}
        compared = "last_episode" if arm.episode else "first_episode"
        turns = [each.get("turns") for each in found[name].values()]
        rows.append(
            {
                "arm": name,
                "control": arm.control,
                "gain": measured[compared][1],
                **{measure: returns for measure, (returns, _) in measured.items()},
                "gains": {measure: gain for measure, (_, gain) in measured.items()},
                "watched": watched,
                "turns": turns,
            }
        )
        print(f"{name:21} against {arm.control}, turns {turns}")
        # All measures matter where the control makes independent tries.
        for measure in MEASURES if ARMS[arm.control].blind else (compared,):
            print(f"    {measure:14} {_text_of(*measured[measure])}")
        for step, (returns, gained) in watched.items():
            print(f"    after step {step:2}  {_text_of(returns, gained)}")
    has_new_memory_arms = any(found[name] for name in ("graph_memory_singly", "graph_memory_fast"))
    files = BASELINES | ({"alike": "methods_told"} if has_new_memory_arms else {})
    for file in dict.fromkeys(("methods", *files.values())):
        if own := [row for row in rows if files.get(row["control"], "methods") == file]:
            write_baseline(file, {"trials": TRIALS, "seeds": seeds, "rows": own})
    return 0


def _values(
    name: str, measure: str, found: dict[str, dict[int, Any]]
) -> tuple[list[float], Gain | None]:
    """Return a measure of an arm by seed, and its gain over the control's."""
    arm, (key, episode) = ARMS[name], MEASURES[measure]
    own, control = (
        {seed: run[ARMS[each].split][key][episode] for seed, run in found[each].items()}
        for each in (name, arm.control)
    )
    return list(own.values()), _gain(name, own, control)


def _watched(
    step: str, name: str, found: dict[str, dict[int, Any]]
) -> tuple[list[float], Gain | None]:
    """Return an arm's compared returns after a step, and their gain over the control's."""
    arm = ARMS[name]
    own, control = (
        {seed: run["watched"][step][arm.episode] for seed, run in found[each].items()}
        for each in (name, arm.control)
    )
    return list(own.values()), _gain(name, own, control)


def _gain(name: str, own: dict[int, float], control: dict[int, float]) -> Gain | None:
    """Return the gain over the control; None for a control, or with fewer than two common seeds."""
    gains = paired(own, control)
    return interval(gains) if name != ARMS[name].control and len(gains) > 1 else None


def _text_of(returns: list[float], gain: Gain | None) -> str:
    values = " ".join(f"{value:+.3f}" for value in returns)
    return values if gain is None else f"{values}  {gain[0]:+.3f} ± {gain[1]:.3f}"


if __name__ == "__main__":
    sys.exit(main())
