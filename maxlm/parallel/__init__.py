"""The named mesh, and the one table that maps logical axes to it."""

from maxlm.parallel.mesh import build_mesh
from maxlm.parallel.sharding import BATCH_AXES, RULES, constrain, mesh_axes, partition_spec

__all__ = ["BATCH_AXES", "RULES", "build_mesh", "constrain", "mesh_axes", "partition_spec"]
