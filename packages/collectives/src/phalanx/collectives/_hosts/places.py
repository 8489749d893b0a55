"""Which rank of a group is on which host, and which ranks carry what crosses between the hosts."""

from collections.abc import Sequence


class Places:
    """The hosts of a group, in the order in which its ranks first name them.

    Attributes:
        hosts: For each host the group ranks there, in order.
        host: This rank's host.
        local: This rank's position on it.
        lanes: How many ranks of each host carry data to the other hosts: as many as the smallest host has. Lane i is
            the i-th rank of every host.
    """

    def __init__(self, names: Sequence[str], group_rank: int) -> None:
        """
        Args:
            names: What each group rank calls its host.
            group_rank: Of this rank.
        """
        listed: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            listed.setdefault(name, []).append(rank)
        self.hosts = list(listed.values())
        self.host = list(listed).index(names[group_rank])
        self.local = self.hosts[self.host].index(group_rank)
        self.lanes = min(len(ranks) for ranks in self.hosts)

    @property
    def here(self) -> list[int]:
        """The group ranks on this host."""
        return self.hosts[self.host]

    @property
    def even(self) -> bool:
        """Whether all hosts have equally many ranks."""
        return all(len(ranks) == self.lanes for ranks in self.hosts)

    @property
    def lane(self) -> int | None:
        """The lane of this rank, or None: others carry its data."""
        return self.local if self.local < self.lanes else None

    def host_of(self, group_rank: int) -> int:
        """The host of a rank."""
        return next(host for host, ranks in enumerate(self.hosts) if group_rank in ranks)

    def shares(self, total: int, unit: int = 1) -> list[int]:
        """How much of `total` each rank of this host carries: equal parts in multiples of `unit` for the lanes."""
        part = -(-total // (self.lanes * unit)) * unit
        lanes = [max(0, min(part, total - lane * part)) for lane in range(self.lanes)]
        return lanes + [0] * (len(self.here) - self.lanes)
