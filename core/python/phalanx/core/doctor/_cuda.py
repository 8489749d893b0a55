"""CUDA: the driver and its devices. A host without them is in order."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from phalanx.core.doctor._host import OK, WARN, Finding, Host, core_module, size
from phalanx.core.doctor._library import torch_cuda

_PROBE = Path(__file__).with_name("_probes.py")
_SECONDS = 60  # a driver that starts takes a second or two, also on a host with many devices
_IMEX = "/dev/nvidia-caps-imex-channels"  # where the channels of nvidia-imex are, of which a process needs one
_ADVICE = {  # by what cuInit returns: cuda.h
    34: "libcuda.so.1 is the stub of the toolkit: take its folder out of LD_LIBRARY_PATH",
    100: "the driver sees no device: CUDA_VISIBLE_DEVICES may hide them, or the container has none (--gpus all)",
    802: "on a host with NVSwitch: start nvidia-fabricmanager of the driver's version",
    803: "libcuda and the kernel's driver have different versions: reboot, or reinstall the driver",
    804: "the compatibility libcuda does not serve this device: take it out of LD_LIBRARY_PATH",
    999: "often the module nvidia-uvm is missing: nvidia-modprobe -u, as root",
}


def ask_cuda_driver() -> dict[str, Any]:
    """What a process of its own finds out: a driver may hang, or crash, and never lets go of the process."""
    command = [sys.executable, "-I", "-S", str(_PROBE), "cuda"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
    except OSError as error:
        return {"trouble": f"could not be tried: {error}"}
    except subprocess.TimeoutExpired:
        return {"trouble": f"the driver did not answer within {_SECONDS} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    except ValueError:
        return {"trouble": f"the driver ended its process with status {done.returncode}"}


def check_cuda(host: Host) -> list[Finding]:
    module = _module_version(host)
    found = ask_cuda_driver()
    if "missing" in found:
        if module is None and not host.exists("/dev/nvidiactl"):
            return [Finding(OK, "cuda", "no driver (ranks on CPU need none)")]
        text = f"the kernel has the driver ({module or 'unknown version'}), but {found['missing']}"
        advice = "in a container: --gpus all, with compute in NVIDIA_DRIVER_CAPABILITIES; else reinstall the driver"
        return [Finding(WARN, "cuda", text, advice)]
    not_affected = "ranks on CPU are not affected; nvidia-smi and dmesg may say more"
    if "trouble" in found:
        return [Finding(WARN, "cuda", found["trouble"], not_affected)]
    text = f"driver {module or 'of unknown version'}, for CUDA {_dotted(found['version'])}"
    if found["status"] != 0:
        text += f"; cuInit says {found['status']} ({found['reason']})"
        return [Finding(WARN, "cuda", text, _ADVICE.get(found["status"], not_affected))]
    devices = found["devices"]
    text += f"; {len(devices)} device(s)"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    text += f", CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else ""
    findings = [Finding(OK, "cuda", text, _how_served() if devices else "")]
    findings += [_device(index, device, host.exists(_IMEX)) for index, device in enumerate(devices)]
    tuning = core_module("tuning")
    if tuning is not None:
        findings += [_tuning(name, tuning) for name in dict.fromkeys(device["name"] for device in devices)]
    return findings


def _device(index: int, device: dict[str, Any], imex: bool) -> Finding:
    major, minor = device["capability"]
    parts = [device["name"], f"sm_{major}{minor}", size(device["memory"])]
    parts.append("shares memory as descriptors" if device["vmm"] and device["fds"] else "cannot share as descriptors")
    if device["fabric"]:
        parts.append("has fabric handles" if imex else f"no fabric handles without {_IMEX}")
    parts.append("multicast" if device["multicast"] else "no multicast")
    if device["peers"]:
        parts.append(f"reaches {', '.join(f'cuda:{peer}' for peer in device['peers'])}")
    return Finding(OK, f"cuda:{index}", ", ".join(parts))


def _tuning(name: str, tuning: Any) -> Finding:
    """What the table says for such GPUs; whether it can be read at all, `tuning` says."""
    path = tuning.table_path()
    try:
        mine = path is not None and path.stat().st_uid in (os.geteuid(), 0)
        rows = tuning.rows_of_gpus(path.read_text(errors="replace")) if path is not None and mine else {}
    except OSError:
        rows = {}
    rows = {key: row for key, row in rows.items() if key.gpu == tuning.one_word(name)}
    if not rows:
        return Finding(OK, "gpu tuning", f"{name}: built-in values, not measured (phalanx tune --device cuda measures)")
    apart, shared = ([str(key.ranks) for key in rows if key.shared == each] for each in (False, True))
    groups = [f"groups of {', '.join(apart)} with a GPU for each rank"] if apart else []
    groups += [f"groups of {', '.join(shared)} that share some"] if shared else []
    text = f"{name}: {path}, for {' and '.join(groups)}"
    strange = [key.ranks for key, row in rows.items() if not all(value.isdecimal() for value in row.values())]
    if strange:
        advice = f"the row for {strange[0]} ranks has a value that is not a number: phalanx tune --device cuda"
        return Finding(WARN, "gpu tuning", text, advice)
    return Finding(OK, "gpu tuning", text)


def _how_served() -> str:
    if torch_cuda() == "":
        return "the torch that is installed is a CPU build: it cannot use them"
    library = core_module()
    if library is None or library.lib.phx_has(b"cuda"):
        return ""
    return "this build of the core serves CPU memory; CUDA tensors go through torch.distributed"


def _module_version(host: Host) -> str | None:
    """The version of the driver in the kernel."""
    text = (host.read("/proc/driver/nvidia/version") or "").partition("\n")[0]
    return next((word for word in text.split() if word[0].isdecimal() and "." in word), None)


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
