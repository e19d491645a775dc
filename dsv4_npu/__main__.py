"""``python -m dsv4_npu``."""

import sys

from dsv4_npu.cli import main

sys.exit(main())
