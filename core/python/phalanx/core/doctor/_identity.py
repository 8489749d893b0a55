"""Which ranks count as being on this host, and as being of this user."""

import os
from collections.abc import Iterator

from phalanx.core.doctor._finding import OK, WARN, Finding
from phalanx.core.doctor._host import Host

# Of the namespaces that the kernel starts with (linux/proc_ns.h). That of net has a fixed number in new kernels only.
_FIRST = {"ipc": 0xEFFFFFFF, "user": 0xEFFFFFFD, "pid": 0xEFFFFFFC, "net": 0xEFFFFFF9}
_EFFECTS = {
    "user": "ranks must be in one user namespace, else each takes the other for another user",
    "net": "ranks in different network namespaces count as different hosts: let containers share one "
    "(--network container:NAME or host; a pod has one)",
    "pid": "of a rank in another pid namespace a closed socket tells that it died",
    "ipc": "Phalanx does not use it",
}
_WHOLE_RANGE = ["0", "0", "4294967295"]


def check_container(host: Host) -> Iterator[Finding]:
    """A note, for who reads the report."""
    groups = host.read("/proc/self/cgroup") or ""
    if host.exists("/.dockerenv"):
        text = "docker"
    elif host.exists("/run/.containerenv"):
        text = "podman"
    elif "KUBERNETES_SERVICE_HOST" in os.environ or "kubepods" in groups:
        text = "kubernetes"
    else:
        text = os.environ.get("container", "") or "none seen"  # noqa: SIM112 (systemd calls it so)
    yield Finding(OK, "container", text)


def check_namespaces(host: Host) -> Iterator[Finding]:
    """One line for each; none is wrong in itself."""
    for kind, effect in _EFFECTS.items():
        name = f"{kind} namespace"
        mine = host.link(f"/proc/self/ns/{kind}")
        if mine is None:
            yield Finding(OK, name, "cannot be read", effect)
            continue
        whose = _whose(host, kind, mine)
        yield Finding(OK, name, f"{mine}, {whose}", "" if whose == "that of the host" else effect)


def _whose(host: Host, kind: str, mine: str) -> str:
    if mine == f"{kind}:[{_FIRST[kind]}]":
        return "that of the host"
    # Process 1 is the host's only in the host's pid namespace.
    first = None
    if host.link("/proc/self/ns/pid") == f"pid:[{_FIRST['pid']}]":
        first = host.link(f"/proc/1/ns/{kind}")
    if first == mine:
        return "that of the host"
    return "not that of the host" if kind != "net" or first is not None else "whose it is cannot be read"


def check_user(host: Host) -> Iterator[Finding]:
    real, effective = os.getuid(), os.geteuid()
    text = f"uid {effective}"
    mapping = (host.read("/proc/self/uid_map") or "").split()
    if mapping and mapping != _WHOLE_RANGE:
        text += f", mapped in a user namespace ({' '.join(mapping)})"
    if real != effective:
        text += f", started by uid {real}"
    yield Finding(OK, "user", f"{text}; ranks of another user are refused")


def check_host_id(host: Host) -> Iterator[Finding]:
    wish = os.environ.get("PHALANX_HOST_ID", "").strip()
    boot = host.read("/proc/sys/kernel/random/boot_id")
    if wish:
        advice = "ranks share memory if they have the same number: unset it, unless you mean to say so"
        yield Finding(OK, "host id", f"{wish}, from PHALANX_HOST_ID", advice)
    elif boot:
        yield Finding(OK, "host id", f"of boot id {boot} and the network namespace")
    else:
        advice = "ranks of two hosts may take each other for neighbours: set PHALANX_HOST_ID to a number for each host"
        yield Finding(WARN, "host id", "the boot id cannot be read", advice)
