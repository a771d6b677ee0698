"""`python -m dapcal` is the command line."""

from dapcal.cli import main

main()
