"""All signatures by name: what each looks like, what to do, and what looks for it."""

from mage_async.doctor.control_signs import cut_short, memory_unused, swap_harmless
from mage_async.doctor.finding import Signature
from mage_async.doctor.learning_signs import (
    EngineMismatch,
    NotFinite,
    NoVariance,
    OffPolicy,
    OverBoundByActor,
)
from mage_async.doctor.policy_signs import (
    EntropyCollapse,
    EntropyRunaway,
    FormatGaming,
    InvalidRising,
    Truncation,
)
from mage_async.doctor.run_signs import (
    ActorsStarving,
    DiskSoonFull,
    LearnerStarving,
    MemberFailing,
)

SIGNATURES: dict[str, Signature] = {
    "not_finite": Signature(
        "The loss or the norm of the gradient is infinite or no number; the update has spoilt the "
        "weights.",
        "Lower learner.learning_rate or learner.grad_clip, or set policy.dtype to float32 where it "
        "is bfloat16, and go on from a checkpoint before it.",
        NotFinite,
    ),
    "no_variance": Signature(
        "Trials of a group earn the same, so nothing can be learned from them, and they could earn "
        "more.",
        "Raise admission.trials_per_group or sampling.temperature, or choose easier tasks in "
        "environment.options; with a reward that is never earned, warm-start by [warm_start].",
        NoVariance,
    ),
    "truncation": Signature(
        "Actions use up their tokens before they are complete, or trials outgrow their context.",
        "Raise transcript.max_action_tokens; for whole trials raise engine.max_tokens.",
        Truncation,
        cut_short,
    ),
    "invalid_actions": Signature(
        "More and more actions are refused or cannot be parsed.",
        "Raise advantage.format_penalty, or let the transcript write the tags: "
        'transcript.forced_tags = "both"; lower learner.learning_rate where entropy rises too.',
        InvalidRising,
    ),
    "entropy_collapse": Signature(
        "Entropy falls to nothing while the return could rise and does not: exploration has ended.",
        "Raise learner.entropy and learner.final_entropy, or lower learner.learning_rate, and go "
        "on from a checkpoint before it.",
        EntropyCollapse,
    ),
    "entropy_runaway": Signature(
        "Entropy rises far above what the policy had come down to: it forgets.",
        "Lower learner.entropy or set learner.entropy_ceiling; lower learner.learning_rate.",
        EntropyRunaway,
    ),
    "off_policy": Signature(
        "The policy is so far from the one that played that importance weights or masks leave few "
        "tokens.",
        "Lower admission.max_staleness, learner.learning_rate or learner.minibatches.",
        OffPolicy,
    ),
    "engine_mismatch": Signature(
        "The engine's log-probs are not those of the weights it says it draws with.",
        'Where the gap grows, the engine misses new weights: set transport.weights = "disk" and '
        'engine.in_flight = "interrupt"; where it was there from the first step, set policy.dtype '
        "to what the engine computes in.",
        EngineMismatch,
    ),
    "over_bound": Signature(
        "One actor plays with weights older than the bound allows.",
        "Restart that actor and look at its log; where its machine is slow, lower "
        "admission.grant_deadline_s, so that others play its groups.",
        OverBoundByActor,
    ),
    "format_gaming": Signature(
        "Valid actions become more while the return falls: the form is learned, not the task.",
        "Lower advantage.format_penalty, and advantage.length_penalty if there is one.",
        FormatGaming,
    ),
    "member_failing": Signature(
        "Groups of one member, or of many, are given up again and again.",
        "Read why by `mage journal RUN_DIR --kind drop` and mend the environment; raise "
        "environment.step_deadline_s where its steps are slow.",
        MemberFailing,
    ),
    "disk_soon_full": Signature(
        "The disk will be full before the last step.",
        "Make room, or lower learner.keep_checkpoints or journal.max_bytes.",
        DiskSoonFull,
    ),
    "learner_starving": Signature(
        "The learner waits for trials nearly all the time.",
        "Start more actors (--actors), raise engine.max_contexts, or admission.max_staleness.",
        LearnerStarving,
    ),
    "actors_starving": Signature(
        "The actors have nothing to play nearly all the time.",
        "Start fewer actors (--actors), or raise admission.max_staleness or learner.threads.",
        ActorsStarving,
    ),
    "memory_unused": Signature(
        "Held-out returns are the same without the earlier episodes in the context.",
        'Pay early episodes for what they teach: credit.kind = "differential" or "cumulative" with '
        "a higher credit.episode_discount; train for more learner.steps.",
        look=memory_unused,
    ),
    "swap_harmless": Signature(
        "Held-out returns are the same where another member is hidden in the last episode: what "
        "was learned is not about this one.",
        "Choose tasks that differ more in environment.options, or look whether a member can be "
        "told from its first episodes at all: raise trial.episodes.",
        look=swap_harmless,
    ),
}
