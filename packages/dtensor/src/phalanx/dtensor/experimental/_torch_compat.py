"""The private parts of torch that this folder relies on. See `phalanx/dtensor/_torch_compat.py`."""

# Read in 2.11 to 2.13.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten
