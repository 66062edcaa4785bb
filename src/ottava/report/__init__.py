"""HTML pages: the frame, style and charts that all share, and the report of a watched run."""
