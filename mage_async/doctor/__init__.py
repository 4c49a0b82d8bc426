"""Find faults of a run, with the first step, the evidence, and a remedy of each.

`Doctor` examines a run after every step, `examine` a recorded run. Both read metrics and
evaluations only, so they find the same in the same run.
"""

from mage_async.doctor.signatures import SIGNATURES, Doctor, Finding, examine

__all__ = ["SIGNATURES", "Doctor", "Finding", "examine"]
