#!/usr/bin/env python3
"""Checks that files include and import only what lies below them, in no circle, and that private names stay private.

.ci/layers.py               prints each offending line of core/src and of the Python packages; exit status 1 if any
.ci/layers.py --svg FOLDER  draws the rooms of core/src (rooms.svg) and the modules of the packages (imports.svg)
"""

import argparse
import ast
import html
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = "core/src/"
ROOMS = {  # of core/src, from the bottom; each may include those before it
    "base": "errors, deadlines, waiting, progress, descriptors, configuration, tuning",
    "kernels": "reduce, copy, random fill",
    "store": "memory, file, TCP, wrapped and prefixed stores",
    "world": "identity, links, monitor, allocators and blocks",
    "group": "members, lanes, exchange, failure, derived groups, recorder",
    "symm": "symmetric allocations, rendezvous, signals, directory",
    "gpu": "driver, memory, kernels, workspaces, messages, multicast, tuning",
    "net": "carriers between hosts: UCX",
    "p2p": "messages: rings, matching, eager and rendezvous",
    "ops": "collectives: plans, algorithms, zero copy, coalesced calls",
    "api": 'every extern "C" function',
}
SOURCES = {
    "core": "core/python/",
    "collectives": "packages/collectives/src/",
    "symm_mem": "packages/symm_mem/src/",
    "dtensor": "packages/dtensor/src/",
    "inductor_plugin": "packages/inductor_plugin/src/",
    "tools": "tools/src/",
}
GROUPS = {  # of Python modules, from the bottom; each may import those before it. A folder stands for all in it
    "core: library": "_paths _version _callbacks _log _lib environment _handle _ucx errors log interrupts uncopied "
    "cache timeouts dtypes torch_ops",
    "core: objects": "memory store message work tuning random _call",
    "core: groups": "_group_calls _blocks coalesced symm group world __init__",
    "core: commands": "commands doctor _versions _cli __main__",
    "collectives: library": "_torch_compat _library extension _native _op_table _errors _layout _cuda reductions bits "
    "_autograd",
    "collectives: groups": "_bootstrap _group_state _registry _process_group _work _async_tensor _recording",
    "collectives: backend": "_c10d phalanx_torch_autoload c10d",
    "collectives: transport": "_call_rows _p2p_streams _transport _kernels _fast_path profiling",
    "collectives: calls": "_operation _functional _functional_coalesced _functional_inplace _barrier _p2p _p2p_ops "
    "_c10d_hooks _recorder _coalescing inference __init__",
    "symm_mem: state": "_torch_compat _state _cuda _signal_pad _process_group _test_mode",
    "symm_mem: memory": "_allocators _pool _handle _allocation _rendezvous _fabric _stats",
    "symm_mem: ops": "_group_buffers _ops triton __init__",
    "dtensor: specs": "_torch_compat device_mesh placement_types _mode _mesh _layout _dtensor_spec _utils "
    "_index_bounds _graph_agreement _compile",
    "dtensor: seeds": "_random.state _random.fill _random.traced _random.distributions random",
    "dtensor: rules": "_rules",
    "dtensor: redistribute": "_redistribute",
    "dtensor: tensors": "_local_spec _tensor _autograd _op_plan _tensor_meta _fallback _interop _factories _composites",
    "dtensor: algorithms": "_algorithms _random",
    "dtensor: dispatch": "_sharding_prop _custom_handlers _foreach _dispatch _fastpath",
    "dtensor: api": "_api _checkpoint _fsdp parallel experimental debug explain __init__",
    "inductor_plugin: graphs": "_torch_compat config report _ops _graph _fx_builder _eligibility _memory_plan",
    "inductor_plugin: passes": "_collective_calls _bucketing _overlap _producers _lowering _passes backend __init__",
    "tools: commands": "_torch_compat _arguments _progress bench trace tune verify demo _commands __init__",
}
# The verifier shows that the rules of phalanx.dtensor are right. It may use private modules, as tests may.
VERIFIER = "tools/src/phalanx/tools/verify/"

Arrows = dict[str, dict[str, int]]  # for each file, the files that it includes or imports, and in which line


# ---- C++ and Python -----------------------------------------------------------------------------------------------


def upward(arrows: Arrows, layer: dict[str, str], order: list[str]) -> Iterator[str]:
    """Arrows against the order of the layers; `layer` has that of each file."""
    for name, others in arrows.items():
        for other, line in others.items():
            if order.index(layer[other]) > order.index(layer[name]):
                yield f"{name}:{line}: {other} ({layer[other]}) lies above ({layer[name]})"


def circles(arrows: Arrows) -> Iterator[str]:
    """Files that need each other."""
    done: set[str] = set()

    def visit(path: list[str]) -> Iterator[str]:
        for other in arrows[path[-1]]:
            if other in path:
                circle = [*path[path.index(other) :], other]
                lines = (f"{name}:{arrows[name][following]}" for name, following in itertools.pairwise(circle))
                yield f"a circle: {' -> '.join(lines)} -> {other}"
            elif other not in done:
                yield from visit([*path, other])
        done.add(path[-1])

    for name in arrows:
        if name not in done:
            yield from visit([name])


def direct(arrows: Arrows, layer: dict[str, str]) -> list[tuple[str, str]]:
    """The arrows between layers, without those that follow from others."""
    pairs = {(layer[name], layer[other]) for name, others in arrows.items() for other in others}
    below = {name: {other for first, other in pairs if first == name != other} for name in set(layer.values())}

    def reach(name: str) -> set[str]:
        return below[name].union(*map(reach, below[name]))

    return sorted((a, b) for a in below for b in below[a] if not any(b in reach(c) for c in below[a]))


def draw(arrows: list[tuple[str, str]], texts: dict[str, str]) -> str:
    """A row for each layer, the top one first, and the arrows between them."""
    top = {name: 16 + 46 * index for index, name in enumerate(reversed(texts))}
    left, bottom = 20, 16 + 46 * len(texts)
    box = 30 + round(7.4 * max(len(name + text) for name, text in texts.items()))
    size = f"0 0 {left + box + 220} {bottom}"
    tip = '<path d="M0 0L8 4L0 8z" fill="#5b7a99"/>'
    marker = 'id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" font-size="13">',
        f"<defs><marker {marker}>{tip}</marker></defs>",
    ]
    for name, y in top.items():
        text = f'<tspan font-weight="bold">{name}</tspan>: {html.escape(texts[name])}'
        lines.append(f'<rect x="{left}" y="{y}" width="{box}" height="32" rx="4" fill="#eef3f8" stroke="#5b7a99"/>')
        lines.append(f'<text x="{left + 12}" y="{y + 21}" fill="#1b2a38">{text}</text>')
    style = 'fill="none" stroke="#5b7a99" stroke-opacity="0.6" marker-end="url(#tip)"'
    for index, (above, below) in enumerate(arrows):
        x, y1, y2 = left + box, top[above] + 12, top[below] + 20
        bend = x + 28 + 230 * (y2 - y1) / bottom + index % 3 * 5
        lines.append(f'<path d="M{x} {y1}C{bend:.0f} {y1} {bend:.0f} {y2} {x + 2} {y2}" {style}/>')
    return "\n".join([*lines, "</svg>", ""])


# ---- C++ ----------------------------------------------------------------------------------------------------------


def room(name: str) -> str:
    return name.removeprefix(CORE).split("/")[0]


def includes(problems: list[str]) -> Arrows:
    """What the files of core/src include of each other; public headers, and what the build makes, are left out."""
    paths = sorted(path for path in (ROOT / CORE).rglob("*") if path.suffix in {".h", ".cpp"})
    arrows: Arrows = {str(path.relative_to(ROOT)): {} for path in paths}
    # Public functions are defined in api/ alone; elsewhere, `extern "C"` is for what others have defined.
    function = re.compile(r"^(?:extern \"C\" )?(?:const )?\w+ \**(phx_\w+)\([^;{]*\)\s*(?:noexcept )?\{", re.MULTILINE)
    for name in arrows:
        text = (ROOT / name).read_text()
        for found in re.finditer(r'^#include "((?!phalanx/|phx_)[^"]+)"', text, re.MULTILINE):
            line = text.count("\n", 0, found.start()) + 1
            if CORE + found[1] in arrows:
                arrows[name][CORE + found[1]] = line
            else:
                problems.append(f"{name}:{line}: {found[1]} is not in {CORE}")
        if room(name) != "api" and name.endswith(".cpp"):
            problems += [f"{name}: {found[1]} is defined here, not in api/" for found in function.finditer(text)]
    return arrows


# ---- Python -------------------------------------------------------------------------------------------------------


def package(file: str) -> str:
    return next(name for name, source in SOURCES.items() if file.startswith(source))


def listed(file: str) -> tuple[str, str]:
    """The group of a file, and the name in GROUPS that stands for it; two empty strings if there is none."""
    inside = file.removeprefix(SOURCES[package(file)]).removeprefix(f"phalanx/{package(file)}/")
    place = inside.removesuffix(".py").replace("/", ".")
    while place:
        for group, names in GROUPS.items():
            if group.startswith(package(file) + ":") and place in names.split():
                return group, place
        place = place.rpartition(".")[0]
    return "", ""


def names_used(tree: ast.Module, parent: str) -> Iterator[tuple[str, int]]:
    """The dotted names that a file imports, at the top, in functions and for types alike, and what it reads of them.

    A syntax tree tells no more: what belongs to an object of torch, as `op._schema` does, is left to readers.
    """
    bound: dict[str, str] = {}  # a name in the file -> what it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            folders = parent.split(".")[: 1 - node.level or None] if node.level else []
            for alias in node.names:
                name = ".".join([*folders, *filter(None, [node.module]), alias.name])
                bound[alias.asname or alias.name] = name
                yield name, node.lineno
        elif isinstance(node, ast.Call) and (
            called := re.fullmatch(r"[\w.]*import_module\('(.*)'\)", ast.unparse(node))
        ):
            yield called[1], node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", text := ast.unparse(node)):
            first, _, others = text.partition(".")
            if first in bound:
                yield f"{bound[first]}.{others}", node.lineno


def private(name: str) -> bool:
    """Whether a part of a dotted name is private. Names of operators are not."""
    parts = name.split(".")
    return parts[:2] != ["torch", "ops"] and any(part.startswith("_") and not part.endswith("__") for part in parts)


def imports(problems: list[str]) -> Arrows:
    """What the files of the packages import of each other.

    An import counts for the file that it names: `from phalanx.core import dtypes` for dtypes.py, `from phalanx.core
    import Group` for `__init__.py`. So an `__init__.py` may import its submodules, which import each other by their
    full paths, while a submodule that takes a name from its `__init__.py` closes a circle.
    """
    files = {}  # by the names of modules
    for source in SOURCES.values():
        for path in sorted((ROOT / source).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / source).with_suffix("").parts)
            files[module.removesuffix(".__init__")] = str(path.relative_to(ROOT))
    arrows: Arrows = {file: {} for file in files.values()}
    for module, file in files.items():
        tree = ast.parse((ROOT / file).read_text())
        for name, line in names_used(tree, module if file.endswith("/__init__.py") else module.rpartition(".")[0]):
            target = name
            while target and target not in files:
                target = target.rpartition(".")[0]
            other = files.get(target)
            if other and other != file:
                arrows[file].setdefault(other, line)
            of_torch = name.startswith("torch.") and not file.endswith("/_torch_compat.py")
            of_others = other and package(other) != package(file) and not file.startswith(VERIFIER)
            if private(name) and (of_torch or of_others):
                problems.append(f"{file}:{line}: {name} is private")
    return arrows


def check(arrows: Arrows, layer: dict[str, str], rows: dict[str, str], picture: Path | None) -> list[str]:
    """What is wrong with the layers. Draws them if nothing is, and a path for the picture is given."""
    if strays := [f"{file}: is in no layer; see {Path(__file__).name}" for file in arrows if layer[file] not in rows]:
        return strays
    problems = [*upward(arrows, layer, list(rows)), *circles(arrows)]
    if picture and not problems:
        picture.write_text(draw(direct(arrows, layer), rows))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    problems: list[str] = []
    sources, modules = includes(problems), imports(problems)
    places = {file: listed(file) for file in modules}
    present = {
        group: [name for name in names.split() if (group, name) in places.values()] for group, names in GROUPS.items()
    }
    rows = {group: " ".join(names) for group, names in present.items() if names}
    groups = {file: group for file, (group, _) in places.items()}
    problems += check(sources, {file: room(file) for file in sources}, ROOMS, given.svg and given.svg / "rooms.svg")
    problems += check(modules, groups, rows, given.svg and given.svg / "imports.svg")
    summary = f"{len(sources) + len(modules)} files: every arrow goes downwards, and nothing private is used elsewhere"
    print("\n".join(problems) or summary)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
