"""Redistribute: from the placements that a tensor has to those that it shall have, over one mesh or to another.

    plan = plan_redistribute(source, target)    # sends nothing; kept for the next call
    print(plan)                                 # one line for each step: collective, mesh dim, bytes, estimate
    local = plan.run(local)                     # collective

`planner` finds the cheapest steps, `local_steps` says what one rank does in each, `comm` runs it over
phalanx.collectives, and `plan_cache` keeps the plans.
"""

from phalanx.dtensor._redistribute.plan_cache import RedistributePlan, plan_redistribute
from phalanx.dtensor._redistribute.planner import Step

__all__ = ["RedistributePlan", "Step", "plan_redistribute"]
