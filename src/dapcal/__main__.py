"""`python -m dapcal` is the command line."""

from dapcal.cli import main

if __name__ == "__main__":  # processes of a service import this file too, under another name
    main()
