"""Which collectives are started where they are and waited for later, so that a late peer does not stop this rank."""

from torch.fx import Node

from phalanx.inductor_plugin import graph
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.cost import estimate_ns
from phalanx.inductor_plugin.eligibility import input_bytes
from phalanx.inductor_plugin.graph import Collective


class Overlap:
    """Decides for one graph, within its budget of memory in flight."""

    def __init__(self, config: Config, position: dict[Node, int]) -> None:
        self._config = config
        self._position = position
        self._before = [0.0]  # how long everything before each position takes, while the graph is as it was
        for node in position if config.overlap_ns else ():
            cost = estimate_ns(node) if graph.form_of(node) is None else 0.0
            self._before.append(self._before[-1] + cost)
        self._flying: list[tuple[int, int, int]] = []  # first and last position, and bytes

    def worth_starting(self, one: Collective) -> Node | None:
        """The node that needs the result first, where enough is computed before it; else None.

        None on a GPU, too: there it is on the stream of the computations, and the host waits for nothing anyway.
        """
        config = self._config
        if config.overlap_ns == 0 or one.form.kind not in ("all_reduce", "broadcast") or one.form.several:
            return None
        if one.tensor().device.type != "cpu":
            return None
        nbytes = input_bytes(one.tensor())
        users = [user for nodes in one.results for user in graph.uses(nodes)]
        if nbytes is None or not users or any(user not in self._position for user in users):
            return None
        first = min(users, key=lambda user: self._position[user])
        begin, end = self._position[one.node], self._position[first]
        if first.op == "output" or self._before[end] - self._before[begin] < config.overlap_ns:
            return None
        flying = sum(size for start, stop, size in self._flying if start <= end and begin <= stop)
        if flying + nbytes > config.overlap_bytes:
            return None
        self._flying.append((begin, end, nbytes))
        return self._first_view(one, first)

    def _first_view(self, one: Collective, first: Node) -> Node:
        """Views of the result that come before its first use: the wait has to come before them."""
        same = {node for nodes in one.results for node in nodes}
        queue = list(same)
        earliest = first
        for node in queue:  # grows
            for user in node.users:
                if user in same or not graph.is_view(user):
                    continue
                same.add(user)
                queue.append(user)
                if self._position[user] < self._position[earliest]:
                    earliest = user
        return earliest
