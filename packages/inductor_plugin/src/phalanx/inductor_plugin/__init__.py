"""A backend of torch.compile that lowers collectives to calls of the core, without copies and waits.

    import torch
    import phalanx.inductor_plugin

    compiled = torch.compile(model, backend="phalanx")

On groups whose ranks share a host, collectives of phalanx.collectives and of torch become calls of the core that are
complete when they return; large inputs are computed into symmetric memory and communicated from there, at the same
address in every iteration. `reports()` says which route each collective took and why.
"""

from phalanx.inductor_plugin._eligibility import REASONS, Route
from phalanx.inductor_plugin.backend import options, phalanx
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.report import CollectiveReport, Report, StrictError, clear_reports, reports

__all__ = [
    "REASONS",
    "CollectiveReport",
    "Config",
    "Report",
    "Route",
    "StrictError",
    "clear_reports",
    "options",
    "phalanx",
    "reports",
]

__version__ = "0.1.0"
