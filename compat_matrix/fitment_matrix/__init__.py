"""What fits which hardware: the gate, the generated matrix, its evidence, and the ``capabilities`` command. Imports no torch."""

__version__ = "0.1.0"
