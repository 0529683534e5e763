"""`python -m forerun` runs the command line."""

from forerun.cli import main

main()
