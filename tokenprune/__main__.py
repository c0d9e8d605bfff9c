"""`python -m tokenprune`."""

from tokenprune.cli import main

if __name__ == "__main__":
    main()
