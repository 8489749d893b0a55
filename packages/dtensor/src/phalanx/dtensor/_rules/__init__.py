"""Sharding rules: one line for each op, one engine that derives every strategy from it, and the choice by cost.

    parser.py             the language: what a rule says
    engine.py             the strategies of a rule for one mesh dim, and which of them combine over several
    constraints.py        the sizes of a call, and the conditions on them that strategies carry
    local_adjustments.py  what a rank does differently from one process
    cost.py               the cheapest strategy for where the inputs are
    registry.py           the table from op to rule
    tables.py             imports all files with rules, which fill the table

`phalanx verify` checks every rule by brute force.
"""
