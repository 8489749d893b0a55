"""The tables of rules: importing this module fills the registry."""

from phalanx.dtensor._rules import cat_split, conv, index, linalg, matmul, nn, pointwise, reduce, view

__all__ = ["cat_split", "conv", "index", "linalg", "matmul", "nn", "pointwise", "reduce", "view"]
