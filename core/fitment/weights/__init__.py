"""Weight families: the few things that a kernel must handle, whatever checkpoint format they came from.

The specs (:mod:`fitment.weights.specs`) import without torch; the tensors (``dense``, ``group_affine``) need it.
"""

from fitment.weights.specs import DenseSpec, GroupAffineSpec, WeightSpec

__all__ = ["DenseSpec", "GroupAffineSpec", "WeightSpec"]
