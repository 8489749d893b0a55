"""Algorithms for calls whose rule would have to bring inputs together: one file for each family of ops.

Each file registers its algorithms in `common` when it is imported; `_custom_handlers` imports all.
"""
