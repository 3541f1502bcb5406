# SPDX-License-Identifier: Apache-2.0
"""``python -m aiohixl`` is the command ``aiohixl``."""

from __future__ import annotations

import sys

from aiohixl.cli import main

if __name__ == "__main__":
    sys.exit(main())
