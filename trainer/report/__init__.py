"""What runs show and leave behind: records, progress, tables, figures, loggers, and the comparison of many.

The report is made from the two record files, so it can be written again for a finished or broken-off run.
Importing this package imports neither torch nor matplotlib: those wait until they are asked for.
"""

from trainer.report.document import REPORT_FILE, write_report
from trainer.report.loggers import Logger, open_loggers
from trainer.report.progress import Progress
from trainer.report.records import MEMORY_FILE, METRICS_FILE, Record, RunRecords, read_records
from trainer.report.tables import Table, final_tables, plan_table

__all__ = [
    "MEMORY_FILE",
    "METRICS_FILE",
    "REPORT_FILE",
    "Logger",
    "Progress",
    "Record",
    "RunRecords",
    "Table",
    "final_tables",
    "open_loggers",
    "plan_table",
    "read_records",
    "write_report",
]
