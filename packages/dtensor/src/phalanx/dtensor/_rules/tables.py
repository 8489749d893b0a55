"""The tables of rules: importing this module fills the registry."""

from phalanx.dtensor._rules import conv, index, linalg, nn, pointwise, reduce, view

__all__ = ["conv", "index", "linalg", "nn", "pointwise", "reduce", "view"]
