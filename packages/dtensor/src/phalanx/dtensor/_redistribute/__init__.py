"""Redistribute: from the placements that a tensor has to those that it shall have, over one mesh or to another.

    t = transfer(source, target)        # plans, and sends nothing; kept for the next call
    print(t)                            # one line for each step: collective, mesh dim, bytes, estimate
    local = t.run(local)                # collective

plan.py finds the cheapest steps, pieces.py what one rank does in each, execute.py runs it over phalanx.collectives,
cross.py is for two meshes.
"""

from phalanx.dtensor._redistribute.plan_cache import Transfer, move, transfer
from phalanx.dtensor._redistribute.planner import Step

__all__ = ["Step", "Transfer", "move", "transfer"]
