"""Groups whose ranks are on several hosts: the core inside each host, gloo between them.

places.py       which rank is where
bridge.py       bytes between the hosts
spanning.py     the collectives
"""

from phalanx.collectives._hosts.bridge import Bridge
from phalanx.collectives._hosts.places import Places
from phalanx.collectives._hosts.spanning import Spanning

__all__ = ["Bridge", "Places", "Spanning"]
