"""Fitment: what fits which accelerator, decided before a weight is read.

The modules of this package that describe (facts, conditions, hardware, kernels, features, formats' descriptors, plugins)
import without torch; those that compute (weights' tensors, ops, graph capture) import it when they are used.
"""

__version__ = "0.1.0"
