"""Whether a GPU can stand for several at once, which the driver alone says."""

import ctypes
from typing import Any

_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h


def has_multicast(device_type: Any, device_idx: int) -> bool:
    """Whether the driver makes multicast objects for a GPU. Not collective.

    Args:
        device_type: As a string, or torch's DeviceType.
        device_idx: Of the GPU.
    """
    if not str(device_type).lower().endswith("cuda"):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, answer = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), int(device_idx)) != 0:
        return False
    asked = driver.cuDeviceGetAttribute(ctypes.byref(answer), _MULTICAST_SUPPORTED, device)
    return bool(asked == 0 and answer.value != 0)
