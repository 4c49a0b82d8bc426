"""What a run with two sides leaves to the agent's trial."""

from typing import Any

from mage_async.environments.calls import Call
from mage_async.trajectory import Trial
from mage_async.trials.trial_run import TrialRun


class TwoSidedRun:
    """As `TrialRun`; what both sides take part in is a subclass's.

    A subclass puts the agent's trial into `_agent`. A duel is never slow, so its calls are those of
    an agent that has none.
    """

    _agent: TrialRun

    def next_call(self) -> Call | None:
        """As `TrialRun.next_call`."""
        return self._agent.next_call()

    def answer(self, value: Any) -> None:
        """As `TrialRun.answer`."""
        self._agent.answer(value)

    def abandon(self) -> list[Call]:
        """As `TrialRun.abandon`."""
        return self._agent.abandon()

    def cut_short(self) -> None:
        """As `TrialRun.cut_short`, whosever prompt it was."""
        self._agent.cut_short()

    def trial(self, duration_s: float = 0.0) -> Trial:
        """The agent's finished trial."""
        return self._agent.trial(duration_s)
