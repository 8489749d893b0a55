"""The tables of rules: to import this module fills the registry."""

from phalanx.dtensor.rules import concatenate, conv, index, linalg, matmul, nn, pointwise, reduce, view

__all__ = ["concatenate", "conv", "index", "linalg", "matmul", "nn", "pointwise", "reduce", "view"]
