"""CommDebugMode: which collectives a piece of program issues, and in which modules.

    with CommDebugMode() as mode:
        model(x).sum().backward()
    mode.get_comm_counts()                              # {c10d_functional.all_reduce: 2}
    print(mode.generate_comm_debug_tracing_table())

Collectives of Phalanx, whether a DTensor issues them or the program, count under torch's names. While any dispatch mode
is on, phalanx.collectives calls its ops through the dispatcher, so that the mode sees them, and no hook is needed.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import torch

from phalanx.collectives import form_of
from phalanx.dtensor._tensor import DTensor
from phalanx.dtensor._torch_compat import TorchDispatchMode, is_fake, is_higher_order, tree_leaves
from phalanx.dtensor.debug._module_tracker import GLOBAL, ModuleTracker

_PY = torch.ops.c10d_functional
_C10D_NAMES: Final = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "gather_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
)
# Ops that say little: shown only with noise_level 3.
_TRIVIAL: Final = frozenset(
    {
        "aten.detach.default",
        "aten.t.default",
        "aten.view.default",
        "aten._to_copy.default",
        "aten.as_strided.default",
        "aten.transpose.int",
    }
)
_COLOR = re.compile(r"\x1B\[[0-?]*[ -/]*[@-~]")


def counted_as(op: Any) -> Any:
    """The op packet under which torch counts an op: of torch.ops.c10d_functional, or of torch.ops.c10d for its own.

    None for what is not a collective; messages and barriers do not count.
    """
    space, _, name = op._schema.name.partition("::")
    if space in ("phalanx", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"):
        form = form_of(name)
        if form is None:
            return None
        return getattr(_PY, form.collective.torch_name + ("_coalesced" if form.takes_list else ""))
    return op._overloadpacket if space == "c10d" and name in _C10D_NAMES else None


class CommDebugMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that are issued within it, by module and pass. Not collective.

    Collectives that are called without DTensors count as well: those of phalanx.collectives, torch's functional
    collectives, and torch.distributed. Collectives within a compiled graph are not counted.

    Attributes:
        comm_counts: The number of calls of each op.
        comm_module_counts: By module, {"forward": counts, "backward": counts}; a collective counts for its module and
            for the modules that contain it.
        comm_module_operation_counts: By module, {"operations_list": ops}.
        advanced_module_tracker: The tracker of the modules.

    Source: torch.distributed.tensor.debug.CommDebugMode.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.comm_counts: dict[Any, int] = defaultdict(int)
        self.comm_module_counts: dict[str, dict[str, dict[Any, int]]] = {}
        self.comm_module_operation_counts: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self.advanced_module_tracker = ModuleTracker()

    # ---- results -----------------------------------------------------------------------------------------------------

    def get_total_counts(self) -> int:
        """How many collectives were issued."""
        return sum(self.comm_counts.values())

    def get_comm_counts(self) -> dict[Any, int]:
        """By op packet (torch.ops.c10d_functional.all_reduce, ...), how often it was issued."""
        return self.comm_counts

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """By module that ran, its own parameters by name."""
        return self.advanced_module_tracker.module_parameters_dict

    def get_sharding_info(self) -> dict[str, Any]:
        """By `module.parameter`, its placements; of parameters that are DTensors."""
        return self.advanced_module_tracker.sharding_dict

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """A text: the modules as a tree, each with its collectives and ops.

        Args:
            noise_level: 0: collectives alone. 1: also parameters, and ops on DTensors that say much. 2: also ops on
                local tensors. 3: all ops.
        """
        lines: list[str] = []
        for name, about in self.advanced_module_tracker.module_helper_dict.items():
            indent = "    " * about["depth"]
            lines.append(f"{indent}{name}")
            if noise_level > 0 and "module_type" in about:
                lines.append(f"{indent}*module type: {about['module_type']}")
            if noise_level > 0 and "parameters" in about:
                lines.append(f"{indent}*Parameter List")
                lines += [f"{indent} *{key}: {placed}" for key, placed in about["parameters"].items()]
            for title, counts, ops in self._passes(name, noise_level):
                if counts or ops:
                    lines.append(f"{indent}  {title}")
                lines += [f"\033[1;33m{indent}    *{op}: {count}\033[0m" for op, count in counts.items()]
                for op in ops:
                    lines.append(f"\033[1;33m{indent}    **{op['name']}\033[0m")
                    if op["input_shape"]:
                        lines += [
                            f"\033[1;31m{indent}      shape: {op['input_shape']}\033[0m",
                            f"\033[1;31m{indent}      sharding: {op['input_sharding']}\033[0m",
                            f"\033[1;31m{indent}      device mesh: {op['device_mesh']}\033[0m",
                        ]
        return "".join(f"{line}\n" for line in lines)

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write the table of `generate_comm_debug_tracing_table` into a file, without colours.

        Args:
            file_name: The path of the file.
            noise_level: As for `generate_comm_debug_tracing_table`.
        """
        Path(file_name).write_text(_COLOR.sub("", self.generate_comm_debug_tracing_table(noise_level)))

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the tree of modules into a file as JSON.

        Each module has fqn, module_type, parameters, collectives, operations and children.

        Args:
            file_name: The path of the file.
            noise_level: As for `generate_comm_debug_tracing_table`.
        """
        helper = self.advanced_module_tracker.module_helper_dict
        nodes: dict[str, dict[str, Any]] = {}
        for name, about in helper.items():
            forward, backward, again = self._passes(name, noise_level)
            nodes[name] = {
                "fqn": name,
                "module_type": about.get("module_type", "") if noise_level > 0 else "",
                "parameters": list(about.get("parameters", {}).items()) if noise_level > 0 else [],
                "collectives_forward": [(str(op), count) for op, count in forward[1].items()],
                "collectives_backward": [(str(op), count) for op, count in backward[1].items()],
                "operations_forward": [_written(op) for op in forward[2]],
                "operations_backward": [_written(op) for op in backward[2]],
                "operations_checkpointing": [_written(op) for op in again[2]],
                "children": [],
            }
            parents = self.advanced_module_tracker.module_parents_dict[name]
            if parents:
                nodes[parents[0]]["children"].append(nodes[name])
        Path(file_name).write_text(json.dumps(nodes[GLOBAL], indent=2))

    def _passes(self, name: str, noise_level: int) -> tuple[tuple[str, dict[Any, int], list[dict[str, Any]]], ...]:
        counts = self.comm_module_counts.get(name, {})
        ops = self.comm_module_operation_counts.get(name, {"operations_list": []})["operations_list"]
        shown = [op for op in ops if _is_shown(op, noise_level)]
        return (
            ("FORWARD PASS", counts.get("forward", {}), [op for op in shown if not op["is_bw"]]),
            (
                "BACKWARD PASS",
                counts.get("backward", {}),
                [op for op in shown if op["is_bw"] and not op["is_activation_checkpointing"]],
            ),
            ("ACTIVATION CHECKPOINTING", {}, [op for op in shown if op["is_activation_checkpointing"]]),
        )

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    # ---- watching ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> "CommDebugMode":
        self.comm_counts.clear()
        self.comm_module_counts.clear()
        self.comm_module_counts[GLOBAL] = {"forward": defaultdict(int), "backward": defaultdict(int)}
        self.comm_module_operation_counts.clear()
        super().__enter__()  # type: ignore[no-untyped-call]
        self.advanced_module_tracker.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.advanced_module_tracker.__exit__(*args)
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_higher_order(func):
            return func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, DTensor)]
        if given:
            # The DTensor runs it, and this mode sees what that makes of it.
            self._note_op(func, given)
            return NotImplemented
        counted = counted_as(func)
        if counted is not None:
            self._count(counted)
        if not any(is_fake(one) for one in tree_leaves((args, kwargs))):
            self._note_op(func, [])
        return func(*args, **kwargs)

    def _note_op(self, op: Any, given: list[Any]) -> None:
        tracker = self.advanced_module_tracker
        own = self.comm_module_operation_counts.setdefault(tracker.name, {"operations_list": []})
        own["operations_list"].append(
            {
                "name": op,
                "input_shape": [one.shape for one in given],
                "input_sharding": [one.placements for one in given],
                "device_mesh": str(given[0].device_mesh) if given else "",
                "is_bw": tracker.is_bw,
                "is_activation_checkpointing": tracker.activation_checkpointing,
            }
        )

    def _count(self, op: Any) -> None:
        self.comm_counts[op] += 1
        key = "backward" if self.advanced_module_tracker.is_bw else "forward"
        for name in self.advanced_module_tracker.chain():
            own = self.comm_module_counts.setdefault(name, {"forward": defaultdict(int), "backward": defaultdict(int)})
            own[key][op] += 1


def _is_shown(op: dict[str, Any], noise_level: int) -> bool:
    if noise_level <= 0:
        return False
    if noise_level == 1 and not op["input_shape"]:
        return False
    return noise_level > 2 or str(op["name"]) not in _TRIVIAL


def _written(op: dict[str, Any]) -> dict[str, Any]:
    return {
        **op,
        "name": str(op["name"]),
        "input_shape": [list(one) for one in op["input_shape"]],
        "input_sharding": [str(one) for one in op["input_sharding"]],
    }
