"""Under which address this host is reached by the others."""

import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Any

# Named as torch's own backends name theirs; the first that is set counts.
INTERFACE_VARIABLES = ("PHALANX_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915
_ANYWHERE = "192.0.2.1"  # for documentation (RFC 5737): only asked for the way there, nothing is sent


def own_address(store: Any) -> str:
    """The address to listen on: that of the interface that a variable names; else that on the way to the server of the
    store; else that of this host's name; else that on the default way; else the loopback.

    Args:
        store: A torch Store.

    Raises:
        OSError: A variable names no interface that has an address.
    """
    for variable in INTERFACE_VARIABLES:
        names = os.environ.get(variable, "")
        if names:
            return _of_interface(variable, names)
    loopback = ""
    for host in (_server_of(store), socket.gethostname(), _ANYWHERE):
        address = _on_the_way_to(host) if host else ""
        if address and not _is_loopback(address):
            return address
        loopback = loopback or address
    return loopback or "127.0.0.1"


def _of_interface(variable: str, names: str) -> str:
    for name in names.split(","):
        address = _ipv4_of(name.strip()) or _ipv6_of(name.strip())
        if address:
            return address
    there = ", ".join(name for _, name in socket.if_nameindex())
    raise OSError(f"{variable} is '{names}', but there is no such interface with an address; there are: {there}")


def _ipv4_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(interface: str) -> str:
    listed = Path("/proc/net/if_inet6")
    for line in listed.read_text().splitlines() if listed.exists() else []:
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope != "20":  # one of a link alone is of no use without the link's name
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


def _server_of(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "") or "")


def _on_the_way_to(host: str) -> str:
    """This host's own address on the way to another one; "" if there is no way."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)  # of a datagram socket: no packet is sent
                own = str(probe.getsockname()[0])
        except OSError:
            continue
        if not own.lower().startswith("fe80:"):
            return own
    return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
