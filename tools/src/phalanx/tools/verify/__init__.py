"""Brute force: every strategy of every rule against one process, on simulated ranks.

`phalanx verify` sweeps torch's OpInfo database; `check_call` checks one call.
"""

from phalanx.tools.verify.check import Outcome, check_call

__all__ = ["Outcome", "check_call"]
