"""The part of torch that is private and measured by `phalanx bench`. Read in torch 2.13.

It is a file of its own because a rank may run in a Python that has torch and no phalanx.
"""

import torch.distributed._functional_collectives as functional_collectives

__all__ = ["functional_collectives"]
