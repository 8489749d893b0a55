"""Rewrites one graph: the arenas of its groups, the values in them with their lifetimes, and the calls."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from phalanx.inductor_plugin import _collective_calls, _graph, _ops
from phalanx.inductor_plugin._eligibility import Decision, Facts, Route, decide, input_bytes
from phalanx.inductor_plugin._fx_builder import FxBuilder, Size
from phalanx.inductor_plugin._graph import Collective
from phalanx.inductor_plugin._memory_plan import SEPARATOR, Lifetime, assign_offsets, describe, plan_text
from phalanx.inductor_plugin._overlap import Overlap
from phalanx.inductor_plugin._producers import Producer, producer_of, sizes_of, write
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.report import CollectiveReport


@dataclass
class Value:
    """An input that lies in the arena.

    Attributes:
        producer: The node that computes it.
        lifetime: Its lifetime and offset; None if its size is symbolic: then it has an arena of its own.
        stays: Whether the result takes its place, and lies there as long as it is used.
        view: The view of the arena, once it has been made.
        released: Whether the next value in its place comes after all its readers.
    """

    producer: Producer
    lifetime: Lifetime | None
    stays: bool
    view: Node | None = None
    released: bool = False


@dataclass
class Task:
    """A collective with its route and its values in an arena."""

    collective: Collective
    decision: Decision
    values: list[Value]


ArenaKey = tuple[str, torch.device]  # the name of its group, and its device


class Lowering:
    """The rewriting of one graph."""

    def __init__(self, graph: Graph, config: Config, facts: Facts) -> None:
        self.config = config
        self.facts = facts
        self.builder = FxBuilder(graph)
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.overlap = Overlap(config, self.position)
        self.arenas: dict[ArenaKey, Node] = {}
        self.names: dict[ArenaKey, str] = {}
        self.arena_bytes: dict[str, int] = {}
        self.own_arenas = 0  # arenas of single values of symbolic size
        self.collectives: list[CollectiveReport] = []
        self.tasks = [self._task(collective) for collective in _graph.collectives(graph)]

    # ---- before anything is changed ----

    def _task(self, collective: Collective) -> Task:
        facts = self.facts(collective.group) if collective.group is not None else None
        decision = decide(collective, facts, self.config)
        if decision.route is not Route.ZERO_COPY:
            return Task(collective, decision, [])
        values = []
        for i in range(len(collective.inputs)):
            producer = producer_of(collective, i)
            if producer is None:
                return Task(collective, Decision(Route.SLOTS, "extern"), [])
            values.append(self._value(collective, i, producer))
        return Task(collective, decision, values)

    def _value(self, collective: Collective, i: int, producer: Producer) -> Value:
        tensor = collective.tensor(i)
        here = self.position[collective.node]
        stays = collective.form.kind in _collective_calls.IN_PLACE and not _graph.leaves_graph(collective.results[i])
        if not isinstance(tensor.numel(), int):
            return Value(producer, None, stays)
        # A copy into a view is placed directly before the collective; a product writes at its own position.
        start = self.position[producer.node] if producer.into else here
        end = here
        if stays:
            end = max((self.position[user] for user in _graph.uses(collective.results[i])), default=here)
        return Value(producer, Lifetime(input_bytes(tensor) or 0, start, end), stays)

    def plan(self) -> None:
        """Assign offsets to the values, and put the arena of each group at the head of the graph."""
        lowered = [task.collective for task in self.tasks if task.decision.route is not Route.FALLBACK]
        for key in dict.fromkeys(_key(collective) for collective in lowered):
            group, device = key
            tasks = [task for task in self.tasks if task.collective.group == group and _key(task.collective) == key]
            lifetimes = [value.lifetime for task in tasks for value in task.values if value.lifetime is not None]
            nbytes = assign_offsets(lifetimes)
            lines = [
                " ".join(
                    [
                        describe(task.collective, on_all_ranks=True),
                        *(f"at {v.lifetime.offset}" for v in task.values if v.lifetime is not None),
                    ]
                )
                for task in tasks
            ]
            text = plan_text(group, self.facts(group).size, lines, nbytes, device.type)
            self.names[key] = text
            self.arena_bytes[group] = self.arena_bytes.get(group, 0) + nbytes
            self.arenas[key] = self.builder.call_at_head(_ops.plain("symm_arena"), nbytes, text, group, _gpu(device))

    # ---- the calls ----

    def run(self) -> None:
        """Rewrite the graph."""
        self.plan()
        for task in self.tasks:
            collective, decision = task.collective, task.decision
            collective.refresh()
            if decision.route is Route.ZERO_COPY:
                copied = self._zero_copy(task)
            elif decision.route is Route.SLOTS:
                decision, copied = self._slots(task)
            else:
                copied = self._copied_by_torch(collective)
            sizes = [input_bytes(collective.tensor(i)) for i in range(len(collective.inputs))]
            nbytes = None if None in sizes else sum(size or 0 for size in sizes)
            copies = self._copied_by_torch(collective), copied
            group, call = collective.group or "?", describe(collective)
            self.collectives.append(CollectiveReport(call, group, decision.route, decision.reason, nbytes, *copies))

    @property
    def order(self) -> Node:
        """The tensor that stands for the order of the collectives of the graph."""
        return next(iter(self.arenas.values()))

    @staticmethod
    def _copied_by_torch(collective: Collective) -> int:
        if collective.form.in_place or collective.form.kind not in _collective_calls.IN_PLACE:
            return 0
        return sum(input_bytes(collective.tensor(i)) or 0 for i in range(len(collective.inputs)))

    def _slots(self, task: Task) -> tuple[Decision, int]:
        collective = task.collective
        first_use = self.overlap.worth_starting(collective)
        if first_use is not None and _collective_calls.can_be_in_place(collective):
            _collective_calls.start_early(self.builder, collective, first_use, self.order)
            return Decision(Route.ASYNC, task.decision.reason), 0
        in_place = _collective_calls.slots(self.builder, collective, self.order)
        return task.decision, 0 if in_place else self._copied_by_torch(collective)

    def _written(self, task: Task) -> list[Node]:
        """The inputs in the arena, in the shapes that the collective takes."""
        inputs = []
        for i, value in enumerate(task.values):
            view = self._view(task.collective, i, value)
            inputs.append(self.builder.before(task.collective.node).shaped_like(view, task.collective.inputs[i]))
        return inputs

    def _zero_copy(self, task: Task) -> int:
        collective = task.collective
        inputs = self._written(task)
        self.builder.before(collective.node)
        if all(value.stays for value in task.values):
            _collective_calls.in_place_on(self.builder, collective, inputs, self.order)
        else:
            _collective_calls.into_new(self.builder, collective, inputs, self.order)
        for value in task.values:
            if value.producer.into:
                self._drop_product(value)
        return 0

    def _drop_product(self, value: Value) -> None:
        """Remove a product that is now written into the arena, and the views of it."""
        for node in reversed(_graph.with_users([value.producer.node], _graph.is_view)):
            if not node.users:
                self.builder.graph.erase_node(node)

    def _view(self, collective: Collective, i: int, value: Value) -> Node:
        """The view of the arena that holds an input, with the calls that write it."""
        key, producer = _key(collective), value.producer
        builder = self.builder.before(producer.node if producer.into else collective.node)
        sizes = sizes_of(builder, producer)
        dtype = _graph.value(producer.node).dtype
        if value.lifetime is None:
            arena, offset = self._arena_of_its_own(builder, key, sizes, dtype), 0
        else:
            arena, offset = self.arenas[key], value.lifetime.offset
            self._release(builder, arena, key, value.lifetime)
        view = builder.call(_ops.plain("arena_view"), arena, offset, sizes, dtype, _gpu(key[1]))
        write(builder, producer, view, sizes)
        value.view = view
        return view

    def _arena_of_its_own(self, builder: FxBuilder, key: ArenaKey, sizes: Sequence[Size], dtype: torch.dtype) -> Node:
        """The arena of one value of symbolic size. It grows with the largest size that has come."""
        name, _, body = self.names[key].partition(SEPARATOR)
        self.own_arenas += 1
        nbytes = builder.product([*sizes, dtype.itemsize])
        text = f"{name}, value {self.own_arenas}{SEPARATOR}{body}"
        return builder.call(_ops.plain("symm_arena"), nbytes, text, key[0], _gpu(key[1]))

    def _release(self, builder: FxBuilder, arena: Node, key: ArenaKey, lifetime: Lifetime) -> None:
        """Order all readers of earlier values in this memory before the write of the next value."""
        readers = [self.order] if arena is not self.order else []
        shared = False
        for task in self.tasks:
            for value in task.values if task.values and _key(task.collective) == key else []:
                before = value.lifetime
                if value.view is None or before is None or value.released:
                    continue
                if before.end < lifetime.start and before.overlaps(lifetime):
                    value.released = shared = True
                    readers.extend(_tensors(_graph.uses([value.view])))
        if shared:
            builder.call(_ops.plain("arena_release_"), arena, list(dict.fromkeys(readers)) or [self.order])


def _gpu(device: torch.device) -> int:
    """How the ops of arenas say where memory lies: the number of a GPU, or -1 for the host."""
    return device.index if device.type == "cuda" else -1


def _key(collective: Collective) -> ArenaKey:
    """The key of the arena of a lowered collective; a collective without tensors belongs to that of the CPU."""
    assert collective.group is not None
    return collective.group, collective.device or torch.device("cpu")


def _tensors(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that are tensors, and the tensors of the nodes that are lists."""
    tensors = []
    for node in nodes:
        if isinstance(_graph.value(node), torch.Tensor):
            tensors.append(node)
        elif isinstance(_graph.value(node), list | tuple):
            tensors.extend(user for user in node.users if isinstance(_graph.value(user), torch.Tensor))
    return tensors
