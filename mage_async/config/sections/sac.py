"""Soft actor-critic instead of the policy gradient."""

from mage_async.config.sections.section import Count, Natural, Positive, Section, Share


class SoftActorCritic(Section):
    """Soft actor-critic over the environment's actions (SAC-GLAM, arXiv 2410.12481); without this
    section a step trains on its own batch alone, by `learner.correction`."""

    entropy_coefficient: Positive = 0.02
    """What a nat of the entropy over valid actions is worth, in units of reward."""
    batch: Count = 64
    """Trials that an update draws from the replay buffer; a step makes `learner.minibatches`
    updates."""
    capacity: Count = 2048
    """Trials in the replay buffer; the oldest make room. Checkpoints hold them."""
    hindsight: Natural = 4
    """Most copies of a trial with another goal, one that it came to; a draw takes the trial or one
    of its copies. 0: no goal is relabelled."""
    critic_rate: Positive = 0.002
    """AdamW's rate of the Q heads."""
    target_rate: Share = 0.05
    """Part of the way that the target heads go towards the Q heads after each update."""
