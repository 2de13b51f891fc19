"""`python -m tfm_export.cli`: the same as the `tfm-export` script."""

from tfm_export.cli import main

main()
