"""`python -m benchmarks compare A.json B.json`: did anything become faster, and is that certain?"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.compare import compare_records
from benchmarks.harness.record import Record, RecordError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when the records could be compared, whatever the verdicts are; 2 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare", help="the verdict on two records, row by row")
    compare.add_argument("before", type=Path, metavar="A.json")
    compare.add_argument("after", type=Path, metavar="B.json")
    compare.add_argument(
        "--ratios",
        action="store_true",
        help="compare each run's ratios to its own memcpy instead of its seconds: less exact, "
        "but right when the machine itself was slower during one of the two",
    )
    arguments = parser.parse_args(argv)
    try:
        before, after = Record.read(arguments.before), Record.read(arguments.after)
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2
    comparison = compare_records(before, after, ratios=arguments.ratios)
    print(comparison.text)
    return 0 if comparison.comparable else 2


if __name__ == "__main__":
    sys.exit(main())
