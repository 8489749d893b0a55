"""One graph's collectives, each on its route: the arenas of the groups, what lies in them and when, and the calls."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from phalanx.inductor_plugin import arena, lower, ops
from phalanx.inductor_plugin import graph as graphs
from phalanx.inductor_plugin.config import Config
from phalanx.inductor_plugin.eligibility import Decision, Facts, Route, decide, input_bytes
from phalanx.inductor_plugin.emit import Emitter, Size
from phalanx.inductor_plugin.epilogue import Epilogue, region_of
from phalanx.inductor_plugin.graph import Collective
from phalanx.inductor_plugin.overlap import Overlap
from phalanx.inductor_plugin.place import Producer, producer_of, sizes_of, write
from phalanx.inductor_plugin.plan import SEPARATOR, Life, describe, place, plan_text
from phalanx.inductor_plugin.report import Line


@dataclass
class Value:
    """An input that lies in the arena.

    Attributes:
        producer: Who computes it.
        life: When and where it lies; None where its size is symbolic: then it has an arena of its own.
        stays: The result takes its place, and lies there as long as it is used.
        view: The view of the arena, once it is there.
        released: What came next in its place waits for who reads it.
    """

    producer: Producer
    life: Life | None
    stays: bool
    view: Node | None = None
    released: bool = False


@dataclass
class Task:
    """A collective and what is to become of it."""

    one: Collective
    decision: Decision
    values: list[Value]


ArenaKey = tuple[str, torch.device]  # the name of its group, and where it lies


class Lowering:
    """The rewriting of one graph.

    Args:
        graph: It.
        config: The options.
        facts: What is known of the groups.
        unpiped: Collectives that would be joined with a product if they were not on a GPU.
    """

    def __init__(self, graph: Graph, config: Config, facts: Facts, unpiped: Collection[Node] = ()) -> None:
        self.config = config
        self.facts = facts
        self.unpiped = unpiped
        self.emit = Emitter(graph)
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.overlap = Overlap(config, self.position)
        self.arenas: dict[ArenaKey, Node] = {}
        self.names: dict[ArenaKey, str] = {}
        self.arena_bytes: dict[str, int] = {}
        self.own_arenas = 0  # of values of symbolic size
        self.lines: list[Line] = []
        self.tasks = [self._task(one) for one in graphs.collectives(graph)]

    # ---- before anything is changed ----

    def _task(self, one: Collective) -> Task:
        facts = self.facts(one.group) if one.group is not None else None
        decision = decide(one, facts, self.config)
        if Epilogue.takes(one, decision, facts, self.config):
            decision = Decision(Route.EPILOGUE)
        elif one.node in self.unpiped and decision.reason in ("", "small"):
            decision = Decision(decision.route, "one-stream")
        if decision.route not in (Route.ZERO_COPY, Route.EPILOGUE):
            return Task(one, decision, [])
        values = []
        for i in range(len(one.inputs)):
            producer = producer_of(one, i)
            if producer is None:
                reason = "small" if decision.route is Route.EPILOGUE else "extern"
                return Task(one, Decision(Route.SLOTS, reason), [])
            values.append(self._value(one, i, producer, decision.route))
        return Task(one, decision, values)

    def _value(self, one: Collective, i: int, producer: Producer, route: Route) -> Value:
        tensor = one.tensor(i)
        here = self.position[one.node]
        stays = route is Route.ZERO_COPY and one.form.kind in lower.IN_PLACE and not graphs.leaves_graph(one.results[i])
        if not isinstance(tensor.numel(), int):
            return Value(producer, None, stays)
        # A copy into a view is put right before the collective; a product writes where it is computed.
        start = self.position[producer.node] if producer.into else here
        end = here
        if stays:
            end = max((self.position[user] for user in graphs.uses(one.results[i])), default=here)
        elif route is Route.EPILOGUE:  # until the peers have read it, which is after the region
            end = max((self.position[node] for node in region_of(one, self.position)), default=here)
        return Value(producer, Life(input_bytes(tensor) or 0, start, end), stays)

    def plan(self) -> None:
        """Place the values, and put the arena of each group at the head of the graph."""
        lowered = [task.one for task in self.tasks if task.decision.route is not Route.KEPT]
        for key in dict.fromkeys(_key(one) for one in lowered):
            group, device = key
            mine = [task for task in self.tasks if task.one.group == group and _key(task.one) == key]
            lives = [value.life for task in mine for value in task.values if value.life is not None]
            nbytes = place(lives)
            lines = [
                " ".join(
                    [
                        describe(task.one, on_all_ranks=True),
                        *(f"at {v.life.offset}" for v in task.values if v.life is not None),
                    ]
                )
                for task in mine
            ]
            text = plan_text(group, self.facts(group).size, lines, nbytes, device.type)
            self.names[key] = text
            self.arena_bytes[group] = self.arena_bytes.get(group, 0) + nbytes
            self.arenas[key] = arena.make(self.emit.call_at_head, device, nbytes, text, group)

    # ---- the calls ----

    def run(self) -> None:
        """Rewrite the graph."""
        self.plan()
        for task in self.tasks:
            one, decision = task.one, task.decision
            one.refresh()
            if decision.route is Route.ZERO_COPY:
                copied = self._zero_copy(task)
            elif decision.route is Route.EPILOGUE:
                copied = self._epilogue(task)
            elif decision.route is Route.SLOTS:
                decision, copied = self._slots(task)
            else:
                copied = self._copied_by_torch(one)
            nbytes = [input_bytes(one.tensor(i)) for i in range(len(one.inputs))]
            known = None if None in nbytes else sum(each or 0 for each in nbytes)
            before = self._copied_by_torch(one)
            self.lines.append(
                Line(describe(one), one.group or "?", decision.route, decision.reason, known, before, copied)
            )

    @property
    def order(self) -> Node:
        """The tensor that stands for the order of what the graph sends."""
        return next(iter(self.arenas.values()))

    @staticmethod
    def _copied_by_torch(one: Collective) -> int:
        if one.form.in_place or one.form.kind not in lower.IN_PLACE:
            return 0
        return sum(input_bytes(one.tensor(i)) or 0 for i in range(len(one.inputs)))

    def _slots(self, task: Task) -> tuple[Decision, int]:
        one = task.one
        first_use = self.overlap.worth_starting(one)
        if first_use is not None and lower.can_be_in_place(one):
            lower.started(self.emit, one, first_use, self.order)
            return Decision(Route.STARTED, task.decision.reason), 0
        in_place = lower.slots(self.emit, one, self.order)
        copied = 0 if in_place or one.form.kind not in lower.IN_PLACE else self._copied_by_torch(one)
        return task.decision, copied

    def _written(self, task: Task) -> list[Node]:
        """The inputs in the arena, in the shapes of the collective."""
        inputs = []
        for i, value in enumerate(task.values):
            view = self._view(task.one, i, value)
            inputs.append(self.emit.before(task.one.node).shaped_like(view, task.one.inputs[i]))
        return inputs

    def _zero_copy(self, task: Task) -> int:
        one = task.one
        inputs = self._written(task)
        self.emit.before(one.node)
        if all(value.stays for value in task.values):
            lower.in_place_on(self.emit, one, inputs, self.order)
        else:
            lower.into_new(self.emit, one, inputs, self.order)
        for value in task.values:
            if value.producer.into:
                self._drop_product(value)
        return 0

    def _epilogue(self, task: Task) -> int:
        group = task.one.group
        assert group is not None
        (value,) = task.values
        assert value.life is not None
        region = region_of(task.one, self.position)
        (view,) = self._written(task)
        Epilogue(self.emit, self.arenas[_key(task.one)], self.facts(group).size).write(
            task.one, view, value.life.offset, region
        )
        if value.producer.into:
            self._drop_product(value)
        return 0

    def _drop_product(self, value: Value) -> None:
        """Take out a product that is now written into the arena, and the views of it."""
        node = value.producer.node
        for user in reversed(self._chain(node)):
            if not user.users:
                self.emit.graph.erase_node(user)

    @staticmethod
    def _chain(node: Node) -> list[Node]:
        found = [node]
        for each in found:  # grows
            found.extend(user for user in each.users if graphs.is_view(user))
        return found

    def _view(self, one: Collective, i: int, value: Value) -> Node:
        """The place of an input, written."""
        key, producer = _key(one), value.producer
        emit = self.emit.before(producer.node if producer.into else one.node)
        sizes = sizes_of(emit, producer)
        dtype = graphs.value(producer.node).dtype
        if value.life is None:
            made, offset = self._arena_of_its_own(emit, key, sizes, dtype), 0
        else:
            made, offset = self.arenas[key], value.life.offset
            self._release(emit, made, key, value.life)
        view = arena.view(emit, made, key[1], offset, sizes, dtype)
        write(emit, producer, view, sizes)
        value.view = view
        return view

    def _arena_of_its_own(self, emit: Emitter, key: ArenaKey, sizes: Sequence[Size], dtype: torch.dtype) -> Node:
        """For a value of symbolic size: it grows with the largest that came."""
        name, _, body = self.names[key].partition(SEPARATOR)
        self.own_arenas += 1
        nbytes = emit.product([*sizes, dtype.itemsize])
        text = f"{name}, value {self.own_arenas}{SEPARATOR}{body}"
        return arena.make(emit.call, key[1], nbytes, text, key[0])

    def _release(self, emit: Emitter, where: Node, key: ArenaKey, life: Life) -> None:
        """Let those who read what lay here before, and what was sent from here, be done before it is written over."""
        readers = [self.order] if where is not self.order else []
        shared = False
        for task in self.tasks:
            for value in task.values if task.values and _key(task.one) == key else []:
                before = value.life
                if value.view is None or before is None or value.released:
                    continue
                if before.end < life.start and before.shares(life):
                    value.released = shared = True
                    readers.extend(_tensors(graphs.uses([value.view])))
        if shared:
            emit.call(ops.plain("arena_release_"), where, list(dict.fromkeys(readers)) or [self.order])


def _key(one: Collective) -> ArenaKey:
    """Of a collective that is lowered; that of the CPU where it has no tensors."""
    assert one.group is not None
    return one.group, one.device or torch.device("cpu")


def _tensors(nodes: Sequence[Node]) -> list[Node]:
    """Those nodes that are tensors, and the parts of those that are several."""
    found = []
    for node in nodes:
        if isinstance(graphs.value(node), torch.Tensor):
            found.append(node)
        elif isinstance(graphs.value(node), list | tuple):
            found.extend(user for user in node.users if isinstance(graphs.value(user), torch.Tensor))
    return found
