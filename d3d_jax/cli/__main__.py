"""`python -m d3d_jax.cli`: the `d3d` command where no script was installed."""

import sys

from d3d_jax.cli.main import main

sys.exit(main())
