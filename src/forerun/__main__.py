"""`python -m forerun` is the command `forerun`."""

from forerun.cli import main

main()
