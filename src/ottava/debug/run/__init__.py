"""The folder of a watched run: what is in it (`schema`), how it is written (`writer`) and read (`reader`)."""
