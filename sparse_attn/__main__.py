"""``python -m sparse_attn``: see `sparse_attn.cli`."""

import sys

from .cli import main

sys.exit(main())
