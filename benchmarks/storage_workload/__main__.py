"""`python -m benchmarks.storage_workload --scenario quick`."""

import shlex
import sys
from collections.abc import Sequence

from benchmarks.storage_workload import document, report, suite
from benchmarks.storage_workload.options import default_output, parse
from benchmarks.storage_workload.pictures import write_pictures
from benchmarks.storage_workload.run import execute
from benchmarks.storage_workload.scenarios import SCENARIOS
from remote_server.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the run passed, 1 when it did not, 2 for impossible options, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["suite"]:
        return suite.main(argv[1:])
    try:
        options = parse(argv, SCENARIOS)
        print(f"as: python -m {document.BENCHMARK} {shlex.join(options.arguments())}", flush=True)
        run = execute(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    found = run.document()
    output = options.output or default_output()
    document.write(found, output)  # before any printing: a closed pipe must not cost it
    write_pictures(run, found)
    print(report.render(found))
    print(f"\n{run.record.describe_machine()}; {run.record.command}; {output}")
    if run.failure is not None:
        print(f"{run.failure}; what was measured until then is in {output}", file=sys.stderr)
    if run.interrupted:
        return 130
    return 0 if found["verdict"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
