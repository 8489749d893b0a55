"""What the demo uses of torch that torch does not list as public."""

# Public, but torch.distributed does not list them for type checkers. Read in 2.13.
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

# Private, but described in torch's notes on extending it. Read in 2.13.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
