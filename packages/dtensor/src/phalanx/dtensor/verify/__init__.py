"""Brute force: every strategy of every rule against one process, on simulated ranks.

`python -m phalanx.dtensor.verify` sweeps torch's OpInfo database; `check_call` checks one call.
"""

from phalanx.dtensor.verify.check import Outcome, check_call

__all__ = ["Outcome", "check_call"]
