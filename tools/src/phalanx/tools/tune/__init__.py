"""`phalanx tune`: where one algorithm takes over from another on this host, measured and written into a table.

`_main` reads the command line, starts the ranks and shows what they found. A rank runs `_cpu_rank` or `_gpu_rank`, by
the rules of `_measure`.
"""
