"""`python -m ottava` is the `ottava` command."""

from ottava.cli.app import main

if __name__ == "__main__":
    main()
