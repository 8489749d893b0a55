"""Collectives that cost nothing under torch.compile.

    import torch
    import phalanx.inductor_plugin

    compiled = torch.compile(model, backend="phalanx")

On groups whose ranks share a host, collectives of phalanx.collectives and of torch become calls of the core that are
complete when they return; large ones are computed into symmetric memory and communicated where they lie, at the same
address in every iteration. What became of each, and why: `reports()`.
"""

from phalanx.inductor_plugin.backend import options, phalanx
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.eligibility import REASONS, Route
from phalanx.inductor_plugin.report import Line, Report, StrictError, clear_reports, reports

__all__ = [
    "REASONS",
    "Config",
    "Line",
    "Report",
    "Route",
    "StrictError",
    "clear_reports",
    "options",
    "phalanx",
    "reports",
]
