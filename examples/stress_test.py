"""A stress test: what is each level of the cache worth?

    python -m examples.stress_test --start
    python -m examples.stress_test --url http://127.0.0.1:8000 --cache-server tcp://127.0.0.1:5757

It measures the n-by-n triangle of times to the first token, of n long documents without common
parts. Round i sends the first i of them in sequence: the last one is new and is computed, the
others come from their present levels. So the set grows by a document a round, exceeds the engine's
own cache, then the CPU pool, then the server's memory, and the times of a round show the speed of
the next level.

With --start all processes are started here, each level sized for the test: the engine's own cache
holds one document, the CPU pool two, the server's memory three, its disk all. With --url sizes are
unknown; the levels of documents are read from the counters of the engine and of the server, as far
as they have any. No other client should use them meanwhile.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import titles
from benchmarks.harness.record import Record
from examples import make_dummy_inputs, target, triangle_picture
from examples.endpoint import EndpointError
from examples.local_stack import BLOCK_TOKENS, Sizes, TooLarge
from examples.make_dummy_inputs import QUESTION_TOKENS, BadInputs, Prompt
from examples.processes import StartFailed
from examples.progress import one_interrupt, step
from examples.target import BadFlags, Target
from examples.token_sources import COMPUTED, DISK, ENGINE, MEMORY, POOL
from examples.triangle import MODULE, Cell, Triangle
from examples.triangle_picture import Drawing, NoPicture
from remote_server.errors import KVFerryError

HOLDS = {ENGINE: 1, POOL: 2, MEMORY: 3}
"""Documents, with --start. The disk holds all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write. 0 when every document came from the expected level; 1 when not, or
    after a failure; 2 for wrong flags; 130 after Ctrl-C, with the results until then."""
    argv = sys.argv[1:] if argv is None else list(argv)
    given = _parser().parse_args(argv)
    try:
        prompts, sizes = _prepare(given)
    except (BadFlags, BadInputs, TooLarge, NoPicture) as error:
        print(f"stress_test: {error}", file=sys.stderr)
        return 2
    triangle = Triangle(len(prompts))
    record = Record.begin(MODULE, argv)
    record.parameters = _parameters(given)
    failure = ""
    with one_interrupt():
        try:
            with target.opened(given, sizes) as asked:
                record.parameters["model"] = given.preset if given.start else asked.model
                measure(asked, prompts, triangle, given)
        except KeyboardInterrupt:
            record.interrupted = True
        except (StartFailed, EndpointError, KVFerryError, BadFlags, OSError) as error:
            failure = str(error)
        record.end()
        wrong = triangle.wrong([*HOLDS.items(), (DISK, given.n)]) if given.start else []
        _report(given, triangle, record, wrong)
    if failure:
        print(f"stress_test: {failure}", file=sys.stderr)
        return 1
    if record.interrupted:
        print("interrupted; nothing that was started runs any more", file=sys.stderr)
        return 130
    return 1 if wrong else 0


def measure(
    asked: Target, prompts: Sequence[Prompt], triangle: Triangle, given: argparse.Namespace
) -> None:
    """Fill the triangle cell by cell; measured cells remain in it after an error."""
    blocks = given.length // BLOCK_TOKENS
    for i, j in Triangle.places(len(prompts)):
        with step(f"round {i} of {len(prompts)}, document {j}"):
            answer, tokens = asked.ask(prompts[j - 1])
        in_document = (answer.prompt_tokens or 0) - given.question
        triangle.cells.append(Cell(i, j, answer.seconds, in_document, tokens))
        if asked.stack is not None:
            # Blocks in transfer would slow the next document down, or be missing.
            asked.stack.wait_for_disk((i if j == i else i - 1) * blocks)
        else:
            time.sleep(given.pause)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target.add_flags(parser)
    parser.add_argument("--n", type=int, default=6,
                        help="documents, and rounds (default: %(default)s)")  # fmt: skip
    parser.add_argument("--length", type=int, default=8000, metavar="TOKENS",
                        help="tokens of a document (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="other seeds give other documents (default: %(default)s)")  # fmt: skip
    parser.add_argument("--filename", type=Path, metavar="FILE",
                        help="with --url: prompts of make_dummy_inputs, all of them, instead of "
                        "--n, --length and --seed")  # fmt: skip
    parser.add_argument("--pause", type=float, default=1.0, metavar="SECONDS",
                        help="with --url: pause after each answer, for pending stores "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", action="append", default=[],
                        help="draw it to this file, .svg or .png; may be repeated")  # fmt: skip
    return parser


def _prepare(given: argparse.Namespace) -> tuple[Sequence[Prompt], Sizes]:
    """Check all arguments before any process is started."""
    target.check_flags(given)
    for path in given.plot:
        triangle_picture.check(path)
    if given.json is not None and not given.json.resolve().parent.is_dir():
        raise BadFlags(
            f"--json {given.json}: there is no folder {given.json.parent}; make it first"
        )
    given.question = QUESTION_TOKENS
    if given.filename is not None:
        if given.start:
            raise BadFlags("--filename goes with --url; --start makes its own documents")
        prompts = make_dummy_inputs.read(given.filename)
        given.n = len(prompts)
        return prompts, Sizes()
    if given.n < 2:
        raise BadFlags(f"--n {given.n}: a triangle needs at least 2 documents; 6 show all levels")
    made = make_dummy_inputs.make_dummy_inputs(
        given.n, given.length, block_size=BLOCK_TOKENS, seed=given.seed
    )
    if not given.start:
        return made, Sizes()
    return made, Sizes.in_documents(
        given.length, given.preset, pool=HOLDS[POOL], memory=HOLDS[MEMORY], disk=given.n
    )


def _parameters(given: argparse.Namespace) -> dict[str, object]:
    parameters: dict[str, object] = {"documents": given.n, "question_tokens": given.question}
    if given.start:
        parameters |= {"block_tokens": BLOCK_TOKENS, "holds_documents": HOLDS}
    return parameters


def _report(
    given: argparse.Namespace, triangle: Triangle, record: Record, wrong: Sequence[str]
) -> None:
    """Write files before printing: a closed pipe must not lose them."""
    if not triangle.cells:
        return
    triangle.add_to(record, str(record.parameters["model"]))
    if given.json is not None:
        record.write(given.json)
    for path in given.plot:
        triangle_picture.draw(triangle, _title(given, record), path)
    print(f"{_title(given, record)}\n\n{triangle.text()}\n")
    for line in wrong:
        print(f"WRONG  {line}")
    if wrong:
        print()
    print(f"{record.describe_machine()}; {record.command}")
    print(f"next: {_advice(given, triangle)}")


def _title(given: argparse.Namespace, record: Record) -> str:
    what = f"{given.n} documents"
    if given.filename is None:
        what += f" of {given.length} tokens"
    return titles.of(record, f"{what}, model {record.parameters['model']}").text


def charts(record: Record) -> dict[str, Drawing]:
    """The triangle of a record."""
    triangle = Triangle.of(record)
    length = triangle.cells[0].document_tokens if triangle.cells else 0
    what = f"{triangle.n} documents of {length} tokens, model {record.parameters['model']}"
    return {"": Drawing(triangle, titles.of(record, what).text)}


def _advice(given: argparse.Namespace, triangle: Triangle) -> str:
    if any(cell.level != COMPUTED for cell in triangle.cells if cell.document == cell.round):
        return f"it knew these documents already; take others: --seed {given.seed + 1}"
    if not triangle.complete:
        return "run it again to the end"
    if given.start:
        return (
            "the same with your own engine: --url http://HOST:PORT --cache-server tcp://HOST:PORT"
        )
    if not given.cache_server:
        return "--cache-server tcp://HOST:PORT separates the server's memory and disk"
    return "a longer --length outgrows more levels"


if __name__ == "__main__":
    sys.exit(main())
