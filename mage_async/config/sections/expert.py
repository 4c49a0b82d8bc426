"""An expert whose actions the policy's are compared with, turn by turn (StepAgent)."""

from typing import Literal

from mage_async.config.sections.section import NonNegative, Positive, Section


class Expert(Section):
    """Step-wise comparison with an expert (StepAgent, arXiv 2411.03817): see
    `docs/methods/stepagent.md`; without this section no expert is asked."""

    form: Literal["implicit", "irl"] = "implicit"
    """"implicit": at every turn the expert's action is preferred to the policy's, as in DPO; "irl":
    a discriminator of the two pays every turn a reward."""
    source: str = "script"
    """"script": the environment's best scripted player; or a file of recorded trials, as
    `mage journal --export FILE.jsonl` writes them; or, implicit, the model directory of a policy
    with the same tokenizer."""
    weight: NonNegative = 1.0
    """Implicit: weight of the preference loss beside that of an advantage of 1; irl: reward per nat
    of the discriminator's log-odds."""
    beta: Positive = 0.1
    """Implicit: DPO's reward per nat between the policy and the one that training began with."""
    smoothing: Positive = 1.0
    """Irl: penalty of the discriminator's squared weights, against counts of steps; small is sharp.
    """
