"""Operations that make the step fast. Each folder is one operation: its definition, its implementations, one public function."""

from maxlm.kernels.attention import attention
from maxlm.kernels.linear_cross_entropy import CrossEntropySums, linear_cross_entropy

__all__ = ["CrossEntropySums", "attention", "linear_cross_entropy"]
