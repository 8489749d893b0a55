"""libphalanx.so.0, and what it was told."""

import json
import os
from collections.abc import Iterator

from phalanx.core.doctor._finding import FAIL, OK, WARN, Finding
from phalanx.core.doctor._host import Host
from phalanx.core.doctor._versions import installed_versions, torch_version


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
