"""`phalanx bench`: the collectives of Phalanx and those of other libraries, measured by one loop in one run.

`_main` reads the command line, `_run` measures in turns, `_team` holds the rank processes of one library, `_limits`
says what the machine allows, `report` shows a result. What runs inside the ranks (`_launch`, `_rank`, `_native` and
the engines) needs nothing but the standard library and the library that it measures: it is also loaded by the Pythons
of the peers' environments, in which Phalanx is not installed.
"""
