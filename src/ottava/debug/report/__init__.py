"""The report of a watched run: one HTML file, for eyes (report.js) and for machines (its tables)."""

from ottava.debug.report.page import Report, make_report, render_report, write_report

__all__ = ["Report", "make_report", "render_report", "write_report"]
