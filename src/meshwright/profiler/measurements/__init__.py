"""What was measured of segments: one SQLite file in the user's cache directory, shared by processes and exchanged."""

from meshwright.profiler.measurements.database import Database, DatabaseError, open_database
from meshwright.profiler.measurements.exchange import export_json, import_json
from meshwright.profiler.measurements.measurement import Key, Measurement, measured_now, this_compiler

__all__ = [
    "Database",
    "DatabaseError",
    "Key",
    "Measurement",
    "export_json",
    "import_json",
    "measured_now",
    "open_database",
    "this_compiler",
]
