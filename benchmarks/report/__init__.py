"""Reports: derived from records alone, at any time."""

from benchmarks.report.frame import load_frame
from benchmarks.report.write import ReportPaths, write_report

__all__ = ["ReportPaths", "load_frame", "write_report"]
