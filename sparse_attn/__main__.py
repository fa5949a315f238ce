"""``python -m sparse_attn``: see `sparse_attn.cli`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
