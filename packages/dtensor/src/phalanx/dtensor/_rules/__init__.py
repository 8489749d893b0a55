"""Sharding rules: one line for each op, one engine that derives every strategy from it, and the choice by cost.

    notation.py    the language: what a rule says
    engine.py      the strategies of a rule for one mesh dim, and which of them combine over several
    conditions.py  the sizes of a call, and the conditions on them that strategies carry
    local.py       what a rank does differently from one process
    cost.py        the cheapest strategy for where the inputs are
    registry.py    the table from op to rule; the other files are its entries

`phalanx.dtensor.verify` checks every rule by brute force.
"""
