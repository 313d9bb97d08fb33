"""``python -m fitment_matrix.cli``."""

import sys

from fitment_matrix.cli import main

sys.exit(main())
