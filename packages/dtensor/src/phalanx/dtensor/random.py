"""Seeds of the random numbers of DTensors. See `torch.distributed.tensor._random`, whose names these are."""

from phalanx.dtensor._random.state import is_rng_supported_mesh, manual_seed

__all__ = ["is_rng_supported_mesh", "manual_seed"]
