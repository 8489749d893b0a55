"""`phalanx trace`: what the flight recorders of a world say about its collectives, and who waits for whom.

`_main` reads the command line, `_read` reads and checks the dumps, `_merge` makes one picture of several, `_analysis`
pairs what the ranks of a group did, `_verdict` says what is stuck. `_text`, `_chrome` and `_picture` show it: as a
report, as trace events, as a timeline.
"""
