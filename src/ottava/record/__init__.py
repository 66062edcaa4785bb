"""The folder of a watched run: its files (`schema`), `writer` and `reader`, and what else it keeps."""
