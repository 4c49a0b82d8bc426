"""The doctor: what is wrong with a run, since which step, why that is thought, and what to do.

`Doctor` is asked after every step of a living run, `examine` reads a run that was recorded. Both
look at metrics and evaluations alone, so they say the same of the same run.
"""

from mage_async.doctor.catalogue import SIGNATURES
from mage_async.doctor.examination import Doctor, examine
from mage_async.doctor.finding import Finding, Signature

__all__ = ["SIGNATURES", "Doctor", "Finding", "Signature", "examine"]
