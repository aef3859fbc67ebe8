"""The named mesh, and the translation of logical axes to it."""

from maxlm.config.sections.mesh import BATCH_AXES, RULES
from maxlm.parallel.mesh import build_mesh
from maxlm.parallel.sharding import constrain, context_size, mesh_axes, mesh_axes_of, partition_spec, split_axes

__all__ = ["BATCH_AXES", "RULES", "build_mesh", "constrain", "context_size", "mesh_axes", "mesh_axes_of", "partition_spec", "split_axes"]
