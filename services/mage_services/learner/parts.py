"""The parts of a learner, made by its configuration."""

from collections.abc import Iterable

from mage_async.admission.concurrency import Concurrency
from mage_async.admission.ledger import SlotLedger
from mage_async.admission.rules import RULES
from mage_async.assembly import environment_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import DeterministicFailure
from mage_async.protocol.journal_records import Head
from mage_async.tasks.matchmaking import Matchmaker
from mage_async.tasks.population import League
from mage_async.tasks.task_stream import TaskStream
from mage_services.journal.writer import JournalFile
from mage_services.learner.coordinator_rules import CoordinatorRules
from mage_services.learner.resume import Begun
from mage_services.processes.startup import Startup
from mage_services.weights.weight_store import WeightStore
from mage_services.weights.weight_transport import weight_transport_of


def ledger_of(config: Config) -> SlotLedger:
    """Slots of groups, by the configured rule."""
    rules = config.admission
    return SlotLedger(
        rules.groups_per_step,
        rules.max_staleness,
        rules.trials_per_group,
        rule=RULES[rules.rule],
        lag=rules.lag,
        concurrency=rules.max_groups_in_play,
    )


def matchmaker_of(config: Config, league: League) -> Matchmaker:
    """What is played, and against which members."""
    environment = environment_of(config)
    return Matchmaker(
        TaskStream(environment, config.seed).task,
        environment,
        league,
        config.population,
        seed=config.seed,
        groups_per_step=config.admission.groups_per_step,
    )


def check_rivals(versions: Iterable[int], weights: WeightStore) -> None:
    """Whether the weights of all rivals that the journal names are there.

    Raises:
        DeterministicFailure: some are gone.
    """
    files = [weights.path(version) for version in sorted(versions)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DeterministicFailure(
            f"the journal names rivals whose weights are gone: {', '.join(map(str, missing))}; "
            "restore them, or begin the run anew"
        )


def pace_of(config: Config) -> Concurrency:
    """How many groups may be in play."""
    rules = config.admission
    return Concurrency(
        rules.max_groups_in_play, rules.groups_per_step, rules.max_staleness, rules.over_age_target
    )


def coordinator_rules_of(config: Config) -> CoordinatorRules:
    """What the coordinator needs to know."""
    return CoordinatorRules(
        config.trial.episodes,
        config.admission.grant_deadline_s,
        config.admission.max_drops_in_a_row,
        config.evaluation.every,
        config.learner.steps,
        config_file.dump(config),
        config.curriculum,
    )


def weight_store_of(startup: Startup, begun: Begun) -> WeightStore:
    """Where weights are published, with what earlier lives of the run published."""
    transport = weight_transport_of(startup.run, startup.config)
    lag = startup.config.admission.lag
    return WeightStore(transport, lag=lag, digests=begun.training.digests)


def newest_checkpoint(begun: Begun) -> int:
    """Version of the newest checkpoint; before the first, 0: there the run began."""
    return begun.training.trainer.version - len(begun.replayed)


def journal_of(startup: Startup, begun: Begun, head: Head) -> JournalFile:
    """A new segment behind those of earlier lives. Their last may have been killed between its
    checkpoint and the deletion of what that made unnecessary.
    """
    rules = startup.config.journal
    journal = JournalFile(
        startup.run.journal, begun.segments, head, rules.max_bytes, rules.segment_bytes
    )
    journal.compact(newest_checkpoint(begun))
    return journal
