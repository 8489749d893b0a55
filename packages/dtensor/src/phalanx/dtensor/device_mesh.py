"""Meshes of ranks: those of torch, under the name that torch.distributed.tensor has for them."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
