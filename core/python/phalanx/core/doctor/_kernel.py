"""The kernel, and what guards processes from each other."""

import platform
from collections.abc import Iterator

from phalanx.core.doctor import _calls
from phalanx.core.doctor._finding import FAIL, OK, WARN, Finding
from phalanx.core.doctor._host import Host

_GLOBAL_EXPEDITED, _REGISTER = 1 << 1, 1 << 2  # linux/membarrier.h: MEMBARRIER_CMD_(REGISTER_)GLOBAL_EXPEDITED
_SECCOMP = {"0": "no seccomp", "1": "seccomp strict", "2": "seccomp filter"}
_PTRACE = {
    0: "any process of the same user may attach",
    1: "only a parent may attach",
    2: "only root may attach",
    3: "nobody may attach",
}
# Those that the kernel lets a process read without a system call.
_FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")


def check_kernel(host: Host) -> Iterator[Finding]:
    text = f"{platform.system()} {platform.release()}"
    if platform.system() == "Linux":
        yield Finding(OK, "kernel", text)
    else:
        yield Finding(FAIL, "kernel", text, "Phalanx runs on Linux")


def check_membarrier(host: Host) -> Iterator[Finding]:
    needed = _GLOBAL_EXPEDITED | _REGISTER
    try:
        if _calls.call("membarrier", 0, 0, 0) & needed != needed:
            raise OSError("the kernel has no global expedited form")
        _calls.call("membarrier", _REGISTER, 0, 0)
        _calls.call("membarrier", _GLOBAL_EXPEDITED, 0, 0)
        yield Finding(OK, "membarrier", "works: a collective passes no full fence to publish")
    except OSError as error:
        advice = "each collective passes a full fence instead: use Linux 4.16 or later, or allow it (seccomp)"
        yield Finding(WARN, "membarrier", f"does not work ({error})", advice)


def check_security(host: Host) -> Iterator[Finding]:
    """Notes: whether these matter is what the trials say."""
    status = host.fields("/proc/self/status")
    text = _SECCOMP.get(status.get("Seccomp", ""), "seccomp: cannot be read")
    text += ", no new privileges" if status.get("NoNewPrivs") == "1" else ""
    profile = host.read("/proc/self/attr/current")  # of AppArmor or SELinux
    text += f", {profile}" if profile else ", no security label"
    enforcing = host.number("/sys/fs/selinux/enforce")
    if enforcing is not None:
        text += f", SELinux {'enforcing' if enforcing else 'permissive'}"
    yield Finding(OK, "security", text)


def check_ptrace(host: Host) -> Iterator[Finding]:
    scope = host.number("/proc/sys/kernel/yama/ptrace_scope")
    if scope is None:
        text = "no yama: any process of the same user may attach"
    else:
        text = f"yama {scope}: {_PTRACE.get(scope, 'not known')}"
    yield Finding(OK, "ptrace", f"{text} (for debuggers and cross-memory attach; Phalanx needs neither)")


def check_clock(host: Host) -> Iterator[Finding]:
    folder = "/sys/devices/system/clocksource/clocksource0"
    clock = host.read(f"{folder}/current_clocksource")
    if clock is None:
        yield Finding(OK, "clock", "the clock source cannot be read")
    elif clock in _FAST_CLOCKS:
        yield Finding(OK, "clock", f"{clock}, read without a system call")
    else:
        there = ", ".join((host.read(f"{folder}/available_clocksource") or "").split())
        advice = f"every wait reads the clock, and this one is slow: boot with clocksource=tsc (available: {there})"
        yield Finding(WARN, "clock", clock, advice)
