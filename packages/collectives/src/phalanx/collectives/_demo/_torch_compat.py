"""The one private thing of torch that the demo uses. Read in torch 2.13; torch's notes on extending it describe it."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
