"""`python -m tfm_export` runs the `tfm-export` command."""

from tfm_export.cli import main

main()
