"""The doctor: finds what is wrong with a run, since which step, on what evidence, and what to do.

`Doctor` examines a run after every step, `examine` a recorded run. Both read metrics and
evaluations only, so they find the same in the same run.
"""

from mage_async.doctor.examination import Doctor, examine
from mage_async.doctor.signatures import SIGNATURES, Finding, Signature

__all__ = ["SIGNATURES", "Doctor", "Finding", "Signature", "examine"]
