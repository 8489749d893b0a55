"""Makes the collectives of a group that spans hosts, when its ranks have met."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from phalanx.collectives import _torch_compat
from phalanx.collectives._hosts.bridge import Bridge
from phalanx.collectives._hosts.carrier import Carrier
from phalanx.collectives._hosts.on_gpus import GpuSpanning
from phalanx.collectives._hosts.places import Places
from phalanx.collectives._hosts.spanning import Spanning
from phalanx.core import Group, PhalanxError, World


def span(
    world: World, name: str, ranks: Sequence[int], places: Places, store: Any, timeout_ms: int, core_name: str
) -> tuple[Group, Spanning]:
    """The core's group of the ranks of a group that are on this host, and its collectives on all hosts. Collective.

    Args:
        world: Of this rank. Its store has the token of the group.
        name: Of the group, for errors.
        ranks: Its global ranks, in order.
        places: Where they are.
        store: A torch store of their own.
        timeout_ms: Of everything.
        core_name: What the core's group is called, but for the host.
    """
    inside = world.create_group(f"{core_name} on host {places.host}", [ranks[each] for each in places.here], timeout_ms)
    try:
        bridge = _bridge(name, ranks, places, store, timeout_ms)
    except PhalanxError as error:
        inside.revoke(str(error))
        raise
    return inside, Spanning(name, places, inside, bridge, timeout_ms)


def span_on_gpus(
    name: str, ranks: Sequence[int], places: Places, inside: Group, backend: str, store: Any, timeout_ms: int
) -> GpuSpanning:
    """The collectives on all hosts for tensors of GPUs. Collective.

    Args:
        name, ranks, places, store, timeout_ms: As for `span`.
        inside: The core's group of the ranks on this host.
        backend: What carries data between the hosts: "nccl", or "gloo" for tensors of the CPU.
    """
    carrier = None
    try:
        bridge = _bridge(name, ranks, places, store, timeout_ms)
        if bridge is not None:
            timeout = timedelta(milliseconds=timeout_ms)
            try:
                own = _torch_compat.PrefixStore(f"{backend} of lane {places.lane}", store)
                made = _torch_compat.make_backend(backend, own, places.host, len(places.hosts), timeout)
            except RuntimeError as error:
                bridge.close()
                raise PhalanxError(f"group '{name}': no {backend} between its hosts: {error}", group=name) from None
            ends = [ranks[host[places.local]] for host in places.hosts]
            carrier = Carrier(made, bridge, ends, name, timeout)
    except PhalanxError as error:
        inside.revoke(str(error))
        raise
    return GpuSpanning(name, places, inside, carrier, timeout_ms)


def _bridge(name: str, ranks: Sequence[int], places: Places, store: Any, timeout_ms: int) -> Bridge | None:
    """That of this rank's lane, if it has one. Collective."""
    lane = places.lane
    if lane is None:
        return None
    ends = [ranks[host[lane]] for host in places.hosts]
    own = _torch_compat.PrefixStore(f"lane {lane}", store)
    return Bridge(own, places.host, ends, timedelta(milliseconds=timeout_ms), name)
