"""Writes the table of durations, `tests/durations.md`, from a report of pytest, for `make durations`.

Read the table before a sweep is made larger: seconds are of one machine, their proportions are not.
"""

import platform
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

TABLE = Path(__file__).with_suffix(".md")
SLOWEST = 40


def read(report: str) -> list[tuple[str, str, float]]:
    """The file, the name and the seconds of each test of a report in JUnit's form."""
    cases = ElementTree.fromstring(report).iter("testcase")
    return [
        (case.get("classname", "").replace(".", "/") + ".py", case.get("name", ""), float(case.get("time", 0)))
        for case in cases
    ]


def lines(tests: list[tuple[str, str, float]]) -> Iterable[str]:
    """The page: how long each file takes, the longest first, and the slowest tests."""
    files: dict[str, list[float]] = defaultdict(list)
    for file, _, seconds in tests:
        files[file].append(seconds)
    total_s = sum(seconds for *_, seconds in tests)
    yield f"# {len(tests)} tests, {total_s / 60:.1f} minutes of one process\n"
    yield f"By `make durations`, Python {platform.python_version()} on {platform.machine()}.\n"
    yield "| file | tests | seconds |\n|---|---:|---:|"
    for file, seconds_of in sorted(files.items(), key=lambda item: -sum(item[1])):
        yield f"| {file} | {len(seconds_of)} | {sum(seconds_of):.1f} |"
    yield f"\nThe {SLOWEST} slowest:\n\n| test | seconds |\n|---|---:|"
    for file, name, seconds in sorted(tests, key=lambda test: -test[2])[:SLOWEST]:
        yield f"| {file}::{name.replace('|', '∣')} | {seconds:.1f} |"


if __name__ == "__main__":
    TABLE.write_text("\n".join(lines(read(Path(sys.argv[1]).read_text(encoding="utf-8")))) + "\n", encoding="utf-8")
