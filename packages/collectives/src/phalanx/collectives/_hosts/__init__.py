"""Groups whose ranks are on several hosts: the core inside each host, TCP between them, and NCCL for tensors of GPUs.

places.py       which rank is where
bridge.py       bytes between the hosts, over TCP
carrier.py      bytes between the hosts, by a backend of torch.distributed
spanning.py     the collectives
on_gpus.py      the collectives, on streams
making.py       how a group gets them
"""

from phalanx.collectives._hosts.bridge import Bridge
from phalanx.collectives._hosts.carrier import Carrier
from phalanx.collectives._hosts.making import span, span_on_gpus
from phalanx.collectives._hosts.on_gpus import GpuSpanning
from phalanx.collectives._hosts.places import Places
from phalanx.collectives._hosts.spanning import Spanning

__all__ = ["Bridge", "Carrier", "GpuSpanning", "Places", "Spanning", "span", "span_on_gpus"]
