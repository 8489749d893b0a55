"""What is installed, by its metadata (nothing is imported, so that this takes milliseconds), and the library itself."""

import contextlib
import difflib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from phalanx.core.cache import cache_path
from phalanx.core.doctor._host import FAIL, OK, WARN, Finding, Host, core_module

_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 15)
# Native modules, which `phalanx build` or their first use compiles: what each is for, and the module that has it.
_NATIVE = {
    "collectives": ("collectives", "phalanx.collectives"),
    "dtensor": ("DTensor", "phalanx.dtensor"),
    "c10d": ("c10d back end", "phalanx.collectives"),
    "symm_mem_pool": ("memory pool", "phalanx.symm_mem"),
}
_PIN = re.compile(r"(phalanx[\w-]*)\s*==\s*([\d.]+)\.\*")  # how our distributions name each other


def installed_versions() -> dict[str, str]:
    """The version of each installed distribution of this project, by name."""
    names = ("core", "collectives", "symm-mem", "dtensor", "inductor-plugin", "tools")
    found = {}
    for name in ("phalanx", *(f"phalanx-{part}" for part in names)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def core_version() -> str:
    """The version of phalanx-core; in a source tree, where it is not installed, that of the library."""
    installed = installed_versions().get("phalanx-core")
    if installed is not None:
        return installed
    from phalanx.core._lib import ffi, lib

    return str(ffi.string(lib.phx_version()).decode())


def torch_version() -> str | None:
    """The version of the torch that is installed."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA that the installed torch was built for: "" for none. None if that is not known."""
    try:
        file = importlib.metadata.distribution("torch").locate_file("torch/version.py")
        text = Path(str(file)).read_text()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    found = re.search(r"^cuda\b[^=\n]*=\s*(?:None|['\"]([\d.]+)['\"])", text, re.MULTILINE)
    return None if found is None else found.group(1) or ""


def check_python(host: Host) -> Finding:
    text = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    return Finding(OK, "python", text)


def check_torch(host: Host) -> Finding:
    version = torch_version()
    if version is None:
        return Finding(OK, "torch", "not installed (phalanx.core needs none)")
    cuda = torch_cuda()
    build = {None: "", "": ", CPU build"}.get(cuda, f", for CUDA {cuda}")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST_TORCH:
        return Finding(WARN, "torch", version + build, "the packages above the core need torch >= 2.11")
    if numbers > _NEWEST_TORCH:
        advice = "2.11 to 2.15 are known to work: run the tests of the packages, or install one of those"
        return Finding(WARN, "torch", version + build, advice)
    return Finding(OK, "torch", version + build)


def check_packages(host: Host) -> Finding:
    versions = installed_versions()
    if not versions:
        advice = "fine in a source tree; otherwise install phalanx-core from its sources: pip install ./core"
        return Finding(WARN, "packages", "no phalanx distribution is installed", advice)
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    wrong = []
    for name in versions:
        for requirement in importlib.metadata.requires(name) or ():
            pin = _PIN.match(requirement)
            if pin is None or ";" in requirement:
                continue
            needed, series = pin.groups()
            present = versions.get(needed, "none")
            if not present.startswith(f"{series}."):
                wrong.append(f"{name} needs {needed} {series}.*, and there is {present}")
    if wrong:
        advice = "install all of them from the sources of one release"
        return Finding(WARN, "packages", f"{text}; {'; '.join(wrong)}", advice)
    return Finding(OK, "packages", text)


def check_native(host: Host) -> Finding | None:
    """The native modules, each of which is a file that is named after the torch that it is for.

    Silent without phalanx.collectives.
    """
    version = torch_version()
    if version is None or importlib.util.find_spec("phalanx.collectives") is None:
        return None
    folder = cache_path("PHALANX_NATIVE", "native")
    if folder is None:
        return Finding(OK, "compiled", "nothing: PHALANX_NATIVE is empty, or there is no cache directory")
    parts = [part for part, (_, module) in _NATIVE.items() if importlib.util.find_spec(module) is not None]
    try:
        files = {part: sorted(folder.glob(f"{part}-torch{version}-*.so")) for part in parts}
        every = [path for paths in files.values() for path in paths]
        open_to_others = [path for path in (folder, *every) if path.exists() and not _is_ours(path)]
    except OSError as error:
        advice = "set PHALANX_NATIVE to a folder of yours"
        return Finding(WARN, "compiled", f"{folder} cannot be read ({error})", advice)
    if open_to_others:
        advice = f"it is not loaded: it must be yours, and chmod go-w {open_to_others[0]}"
        return Finding(WARN, "compiled", f"others may write {open_to_others[0]}", advice)
    states = [f"{_NATIVE[part][0]} {'compiled' if files[part] else 'not compiled'}" for part in parts]
    text = f"{', '.join(states)}, for torch {version} in {folder}"
    advice = "run `phalanx build` again after upgrading torch or phalanx"
    if not all(files.values()):
        advice = "`phalanx build` compiles what is missing: calls get faster, and no first use waits for a compiler"
    return Finding(OK, "compiled", text, advice)


def _is_ours(path: Path) -> bool:
    about = path.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


# ---- libphalanx.so.0, and what it was told ---------------------------------------------------------


def known_variables() -> frozenset[str]:
    """The environment variables that Phalanx reads. Empty if this build has no list of them."""
    environment = core_module("environment")
    return frozenset(variable.name for variable in environment.variables()) if environment else frozenset()


def check_environment(host: Host) -> Iterator[Finding]:
    """What is set, and a warning for each variable that has no effect."""
    name = "environment"
    present = sorted(variable for variable in os.environ if variable.startswith("PHALANX_"))
    words = " ".join(f"{variable}={os.environ[variable]}" for variable in present)
    yield Finding(OK, name, words or "no PHALANX_ variable is set")
    known = known_variables() or present
    for variable in present:
        if variable not in known:
            similar = difflib.get_close_matches(variable, known, 1)
            advice = f"it has no effect: unset it{f', or set {similar[0]}' if similar else ''}"
            yield Finding(WARN, name, f"{variable} is not a variable of Phalanx", advice)
    folder = os.environ.get("PHALANX_DUMP")
    if folder and not os.path.isdir(folder):
        advice = f"nothing is written when a group fails: mkdir -p {folder}"
        yield Finding(WARN, name, f"PHALANX_DUMP is {folder}, which is not a folder", advice)
    size = os.environ.get("LOCAL_WORLD_SIZE")
    if size is not None and not (size.isdecimal() and int(size) > 0):
        advice = "torchrun sets it to the number of ranks on this host: unset it, or correct it"
        yield Finding(WARN, name, f"LOCAL_WORLD_SIZE is {size!r}, which is not a number of ranks", advice)


def check_library(host: Host) -> Iterator[Finding]:
    try:
        from phalanx.core._lib import ABI_VERSION, ffi, lib, library_path
    except ImportError as error:
        advice = "reinstall phalanx-core, or set PHALANX_LIBRARY to a build of it"
        yield Finding(FAIL, "library", str(error), advice)
        return
    build = json.loads(ffi.string(lib.phx_build_info()).decode())
    version, abi = ffi.string(lib.phx_version()).decode(), lib.phx_abi_version()
    text = f"{version}, ABI {abi} (this binding: {ABI_VERSION}), build {build.get('build', 'unknown')}, {library_path}"
    installed = installed_versions().get("phalanx-core", version)
    if installed == version:
        yield Finding(OK, "library", text)
    else:
        advice = f"phalanx-core is {installed}: reinstall it, or unset PHALANX_LIBRARY"
        yield Finding(WARN, "library", text, advice)
    yield Finding(OK, "compiler", str(build.get("compiler", "unknown")))
    features = build.get("features", [])
    yield Finding(OK, "features", ", ".join(map(str, features)) if features else "none")
    if torch_version() is not None:
        ops = library_path.with_name("libphalanx_torch.so")
        if ops.is_file():
            yield Finding(OK, "torch ops", str(ops))
        else:
            advice = "torch.ops.phalanx needs it: reinstall phalanx-core, or build with PHX_BUILD_TORCH=ON"
            yield Finding(WARN, "torch ops", f"no {ops}", advice)


def check_tuning(host: Host) -> Finding | None:
    """The table that new groups read. Silent where the library cannot be loaded: see `library`."""
    tuning = core_module("tuning")
    if tuning is None:
        return None
    path = tuning.table_path()
    try:
        if path is None or not path.exists():
            return Finding(OK, "tuning", f"built-in values; there is no {path or 'table'} (phalanx tune measures)")
        if path.stat().st_uid not in (os.geteuid(), 0):
            return Finding(WARN, "tuning", f"{path} belongs to another user", "it is not read: run phalanx tune")
        table = path.read_text(errors="replace")
    except OSError as error:
        return Finding(WARN, "tuning", f"{path} cannot be read ({error})", f"mend or remove it; {_USES_BUILT_IN}")
    rows = tuning.rows_of_host(table)
    lines = enumerate(table.splitlines(), 1)
    damaged = next((number for number, line in lines if _is_damaged(line, tuning.row_of(line))), 0)
    if damaged:
        advice = f"the line is ignored: remove it or the file, and run `phalanx tune` again; {_USES_BUILT_IN}"
        return Finding(WARN, "tuning", f"{path}, line {damaged} is not a row of a tuning table", advice)
    if not rows:
        return Finding(OK, "tuning", f"built-in values; {path} has none for this host (phalanx tune measures)")
    strange = [ranks for ranks, row in rows.items() if not all(value.isdecimal() for value in row.values())]
    text = f"{path}, for groups of {', '.join(map(str, rows))} ranks"
    if strange:
        advice = f"the row for {strange[0]} ranks has a value that is not a number: phalanx tune --ranks {strange[0]}"
        return Finding(WARN, "tuning", text, advice)
    if host.ranks not in rows:
        return Finding(OK, "tuning", text, f"to measure groups of {host.ranks}: phalanx tune --ranks {host.ranks}")
    return Finding(OK, "tuning", text)


_USES_BUILT_IN = "groups without a sound row use the built-in values"


def _is_damaged(line: str, row: dict[str, str]) -> bool:
    """Whether `phalanx tune` cannot have written a line, of which `row` is what could be read."""
    words, of_gpu = line.split(), "gpu" in row and row.get("shared") in ("0", "1")
    sound = all("=" in word for word in words) and row.get("ranks", "").isdecimal()
    return bool(words) and not (sound and ("host" in row or of_gpu))
