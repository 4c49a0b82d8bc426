"""What trials are told of earlier tasks."""

from typing import Literal

from mage_async.config.sections.section import Count, Natural, NonNegative, Positive, Section, Share


class MemoryRules(Section):
    """The trainable graph memory of arXiv 2511.07800; see `mage_async/graph_memory/`."""

    strategies: Natural = 0
    """Strategies of earlier tasks that a guided trial begins with, at most; 0: there is no memory.
    """
    guided: Share = 0.5
    """Share of a group's trials that are told of strategies, at least one and not all; what the
    others earn is what a strategy's use is measured against. A warm start tells as many of its
    scripted trials, so that the policy learns to read."""
    rate: NonNegative = 1.0
    """Step size of the weights of edges, per unit of a trial's mean return an episode."""
    initial: Positive = 0.5
    """Weight of a new edge."""
    max_paths: Count = 64
    """Paths that are remembered; of more the weakest are forgotten."""
    max_bytes: Count = 512
    """Bytes of all strategies that a trial is told, which are at least as many as their tokens."""
    rewards: Literal["own", "shuffled"] = "own"
    """Whether the memory learns from what each action earned, or, as a control, from what another
    action of the batch earned."""
