"""The `ottava` command: one file per subject, its subcommands listed in app.py."""
