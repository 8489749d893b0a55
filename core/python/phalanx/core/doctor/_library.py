"""What is installed, by its metadata (nothing is imported, so that this takes milliseconds), and the library itself."""

import contextlib
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
from phalanx.core.doctor._host import FAIL, OK, WARN, Finding, Host

_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 15)
# What is compiled on a host, and the module without which `phalanx build` does not compile it; None: it never does.
_COMPILED = {"collectives": "phalanx.collectives", "dtensor": "phalanx.dtensor", "c10d": None}
_PIN = re.compile(r"(phalanx[\w-]*)\s*==\s*([\d.]+)\.\*")  # how our distributions name each other


def installed_versions() -> dict[str, str]:
    """Version of each installed distribution of this project, by name."""
    names = ("core", "collectives", "symm-mem", "dtensor", "inductor-plugin", "tools")
    found = {}
    for name in ("phalanx", *(f"phalanx-{part}" for part in names)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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


def check_python(host: Host) -> Iterator[Finding]:
    text = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    yield Finding(OK, "python", text)


def check_torch(host: Host) -> Iterator[Finding]:
    version = torch_version()
    if version is None:
        yield Finding(OK, "torch", "not installed (phalanx.core needs none)")
        return
    cuda = torch_cuda()
    build = {None: "", "": ", CPU build"}.get(cuda, f", for CUDA {cuda}")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST_TORCH:
        yield Finding(WARN, "torch", version + build, "the packages above the core need torch >= 2.11")
    elif numbers > _NEWEST_TORCH:
        advice = "2.11 to 2.15 are known to work: run the tests of the packages, or install one of those"
        yield Finding(WARN, "torch", version + build, advice)
    else:
        yield Finding(OK, "torch", version + build)


def check_packages(host: Host) -> Iterator[Finding]:
    versions = installed_versions()
    if not versions:
        advice = "fine in a source tree; otherwise install phalanx-core from its sources: pip install ./core"
        yield Finding(WARN, "packages", "no phalanx distribution is installed", advice)
        return
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
        yield Finding(WARN, "packages", f"{text}; {'; '.join(wrong)}", advice)
    else:
        yield Finding(OK, "packages", text)


def check_native(host: Host) -> Iterator[Finding]:
    """What `phalanx build` and the first use of the c10d backend compile: named after the torch that it is for.

    Silent without phalanx.collectives.
    """
    version = torch_version()
    if version is None or importlib.util.find_spec("phalanx.collectives") is None:
        return
    folder = cache_path("PHALANX_NATIVE", "native")
    if folder is None:
        yield Finding(OK, "compiled", "nothing: PHALANX_NATIVE is empty, or there is no cache directory")
        return
    try:
        parts = {what: sorted(folder.glob(f"{what}-torch{version}-*.so")) for what in _COMPILED}
        there = [path for paths in parts.values() for path in paths]
        open_to_others = [path for path in (folder, *there) if path.exists() and not _is_ours(path)]
    except OSError as error:
        yield Finding(WARN, "compiled", f"{folder} cannot be read ({error})", "set PHALANX_NATIVE to a folder of yours")
        return
    missing = [
        what
        for what, module in _COMPILED.items()
        if module is not None and not parts[what] and importlib.util.find_spec(module) is not None
    ]
    if open_to_others:
        advice = f"it is not loaded: it must be yours, and chmod go-w {open_to_others[0]}"
        yield Finding(WARN, "compiled", f"others may write {open_to_others[0]}", advice)
    elif missing:
        present = ", ".join(map(str, there)) or f"nothing for torch {version} in {folder}"
        advice = f"phalanx build compiles what is missing ({', '.join(missing)}): a few microseconds less for each call"
        yield Finding(OK, "compiled", present, advice)
    else:
        advice = "after an update of torch or of phalanx, run phalanx build again"
        yield Finding(OK, "compiled", ", ".join(map(str, there)), advice)


def _is_ours(path: Path) -> bool:
    about = path.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


# ---- libphalanx.so.0, and what it was told ---------------------------------------------------------


def check_environment(host: Host) -> Iterator[Finding]:
    words = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("PHALANX_")]
    yield Finding(OK, "environment", " ".join(words) or "no PHALANX_ variable is set")


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
    if installed != version:
        advice = f"phalanx-core is {installed}: reinstall it, or unset PHALANX_LIBRARY"
        yield Finding(WARN, "library", text, advice)
    else:
        yield Finding(OK, "library", text)
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


def check_tuning(host: Host) -> Iterator[Finding]:
    """The table that new groups read. Silent where the library cannot be loaded: see `library`."""
    try:
        from phalanx.core import tuning
    except ImportError:
        return
    path = tuning.table_path()
    try:
        if path is None or not path.exists():
            yield Finding(OK, "tuning", f"built-in values; there is no {path or 'table'} (phalanx tune measures)")
            return
        if path.stat().st_uid not in (os.geteuid(), 0):
            yield Finding(WARN, "tuning", f"{path} belongs to another user", "it is not read: run phalanx tune")
            return
        rows = tuning.rows_of_host(path.read_text(errors="replace"))
    except OSError as error:
        yield Finding(WARN, "tuning", f"{path} cannot be read ({error})", "built-in values are used instead")
        return
    if not rows:
        yield Finding(OK, "tuning", f"built-in values; {path} has none for this host (phalanx tune measures)")
        return
    strange = [ranks for ranks, row in rows.items() if not all(value.isdecimal() for value in row.values())]
    text = f"{path}, for groups of {', '.join(map(str, rows))} ranks"
    if strange:
        advice = f"the row of {strange[0]} ranks is no work of phalanx tune: run phalanx tune --ranks {strange[0]}"
        yield Finding(WARN, "tuning", text, advice)
    elif host.ranks not in rows:
        yield Finding(OK, "tuning", text, f"for groups of {host.ranks}: phalanx tune --ranks {host.ranks}")
    else:
        yield Finding(OK, "tuning", text)
