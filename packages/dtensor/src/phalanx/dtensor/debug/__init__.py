"""Looking at what DTensors do: which collectives are issued, by which module, and which rank has what.

Names and signatures follow torch.distributed.tensor.debug.
"""

from phalanx.dtensor.debug._comm_mode import CommDebugMode
from phalanx.dtensor.debug._visualize_sharding import draw_sharding, visualize_sharding

__all__ = ["CommDebugMode", "draw_sharding", "visualize_sharding"]
