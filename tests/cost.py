"""What each part of the tests costs, from the report that pytest writes: ``python -m tests.cost results/tests.xml``.

Seconds are those in which a worker was busy with a test or waited in it for other processes, with setup and teardown.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Iterator


def table(cases: Iterable[tuple[str, str, float]]) -> Iterator[str]:
    """Return a row per folder of tests as Markdown, the most expensive first.

    Args:
        cases: dotted module, name and seconds of each test.
    """
    folders: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for module, name, seconds in cases:
        folders[module.rpartition(".")[0].replace(".", "/")].append((seconds, name.split("[")[0].split("@")[0]))
    yield "| folder | tests | seconds of a worker | longest test |"
    yield "|---|---:|---:|---|"
    for folder, taken in sorted(folders.items(), key=lambda item: -sum(seconds for seconds, _ in item[1])):
        longest, name = max(taken)
        yield f"| `{folder}` | {len(taken):,} | {sum(each for each, _ in taken):,.0f} | `{name}`, {longest:.0f} s |"


def main() -> None:
    """Print the table of a report of ``pytest --junitxml``."""
    cases = ElementTree.parse(sys.argv[1]).iter("testcase")
    for line in table((case.attrib["classname"], case.attrib["name"], float(case.attrib["time"])) for case in cases):
        print(line)


if __name__ == "__main__":
    main()
