"""What every room may use: errors, files, settings, texts, and how to read what other people wrote."""
