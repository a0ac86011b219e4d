"""The table of durations names each file with its seconds, the longest first."""

from tests.durations import lines, read

REPORT = """<testsuites><testsuite>
<testcase classname="tests.cli.test_app" name="test_help[a|b]" time="0.5"/>
<testcase classname="tests.zoo.test_gpt" name="test_loss" time="60.0"/>
<testcase classname="tests.cli.test_app" name="test_models" time="1.0"/>
</testsuite></testsuites>"""


def test_files_are_summed_and_the_slowest_tests_named():
    page = list(lines(read(REPORT)))
    assert page[0].startswith("# 3 tests, 1.0 minutes")
    assert page[3:5] == ["| tests/zoo/test_gpt.py | 1 | 60.0 |", "| tests/cli/test_app.py | 2 | 1.5 |"]
    assert page[6:] == [
        "| tests/zoo/test_gpt.py::test_loss | 60.0 |",
        "| tests/cli/test_app.py::test_models | 1.0 |",
        "| tests/cli/test_app.py::test_help[a∣b] | 0.5 |",
    ]
