"""Patience: what does waiting for the cache cost, against an oracle that knows how long it takes?

Prompts that the server holds, in virtual time: the tier decides, and models of the engine, the
server and the link have the times that are given. Nothing else runs, so the figures depend on the
commit alone.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from math import ceil, inf
from typing import Any, NamedTuple

from benchmarks.harness import options, plot, table, titles
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner, Skipped
from benchmarks.harness.statistics import percentile
from remote_server.values import MiB

MODULE = "benchmarks.remote_kv_cache.test_patience"

BLOCKS = 64
BLOCK_BYTES = 2 * MiB
COMPUTE_S = (0.05, 0.2, 1.0, 5.0, 30.0, 120.0)
LINK_MB_S = (10, 100, 1000, 3000)
ANSWERS_MS = (0, 50)
QUICK_S = 0.0002
"""The delay of a server that is idle and near."""

OURS, FORMER, ALWAYS, NEVER = "patience", "former limits", "always wait", "never wait"
POLICIES = (OURS, FORMER, ALWAYS, NEVER)

OUTAGES = ("frozen between prompts", "frozen in a load")
"""Of these the cost of the outage is shown, and no regret: the oracle knows that it will happen."""


class Scene(NamedTuple):
    """How the server behaves."""

    delay_s: float = QUICK_S
    jitter: float = 0.0
    pauses: tuple[float, float] | None = None
    """It stands still for the second of these times in each period of the first."""
    freezes_at: float | None = None
    """After some prompts: so far in a load, as a share of it, it stands still for good."""
    is_first: bool = False
    """The engine has computed nothing yet, and is asked for one prompt."""


SCENES = {
    "quick": Scene(),
    "quick, an engine's first prompt": Scene(is_first=True),
    "late by 50 ms": Scene(0.05),
    "late by 0.2 s": Scene(0.2),
    "late by 1 s": Scene(1.0),
    "late by 5 s": Scene(5.0),
    "late by 0.05 to 0.2 s": Scene(0.05, jitter=3.0),
    "stops for 0.3 s in 10": Scene(pauses=(10.0, 0.3)),
    "stops for 2 s in 60": Scene(pauses=(60.0, 2.0)),
    OUTAGES[0]: Scene(freezes_at=0.0),
    OUTAGES[1]: Scene(freezes_at=0.5),
}

PRIOR = 1 / 3
"""Before it has computed anything, the engine is taken for three times as slow as it is."""

PROMPTS_BEFORE_AN_OUTAGE = 5
COLUMNS = ("median", "p99", "worst", "computed in vain, %")


class Cell(NamedTuple):
    """What one engine met."""

    policy: str
    scene: str
    compute_s: float
    link_mb_s: float
    answers_ms: float
    """What the answers of other requests add to each step."""


class Outcome(NamedTuple):
    """Of the prompts of a cell."""

    regrets: list[float]
    """Time to first token, to that of the oracle."""
    in_vain: float
    """The share of the blocks that were computed where the oracle loads them."""
    outage_s: float
    """Time that prompts lost in an outage, in all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    record = Record.begin(MODULE, argv)
    cells = [
        Cell(policy, scene, compute_s, link, answers_ms)
        for policy in arguments.policies
        for scene in arguments.scenes
        for compute_s in arguments.compute_s
        for link in arguments.link_mb_s
        for answers_ms in arguments.answers_ms
    ]
    found: dict[Cell, Outcome] = {}
    with Runner(1, 0) as runner:
        try:
            for number, cell in enumerate(cells, 1):
                runner.show(f"engine {number} of {len(cells)}: {cell.policy}, {cell.scene}")
                found[cell] = outcome_of(cell, arguments.prompts)
        except Skipped as error:
            print(f"SKIPPED: {error}")
            return 0
        except KeyboardInterrupt:
            runner.interrupted = True
    runner.show("")
    record.figures += figures_of(found)
    options.write(record, runner, arguments, chart)
    print(_described(record.figures))
    return options.finish(record, runner)


def outcome_of(cell: Cell, num_prompts: int) -> Outcome:
    """Serve prompts one after the other. Raises `Skipped` without vLLM."""
    try:
        from benchmarks.simulated.modelled_client import Link
        from benchmarks.simulated.virtual_engine import engine_of
    except ImportError as error:
        raise Skipped(f"no vLLM: {error}") from None

    scene = SCENES[cell.scene]
    block_s = BLOCK_BYTES / (cell.link_mb_s * 1e6)
    link = Link(scene.delay_s, block_s, scene.jitter, [*_pauses(scene)])
    compute = _compute_of(cell)
    if cell.policy == NEVER:
        return _never(cell, num_prompts, link, compute)
    settings = {"patience": 1000, "max_wait_ms": 600_000, "break_even": False}
    outcome = Outcome([], 0.0, 0.0)
    regrets, in_vain, outage_s = outcome.regrets, 0, 0.0
    num_prompts = 1 if scene.is_first else num_prompts
    with engine_of(
        compute, link, BLOCKS, adjust=_former_limits if cell.policy == FORMER else None,
        **(settings if cell.policy == ALWAYS else {}),
    ) as engine:  # fmt: skip
        if not scene.is_first:
            engine.warm_up()
        for number in range(num_prompts):
            if scene.freezes_at is not None and number == PROMPTS_BEFORE_AN_OUTAGE:
                begins_s = 2 * scene.delay_s + scene.freezes_at * BLOCKS * block_s
                link.pauses = [(engine.client.now + begins_s, inf)]
            plain = deepcopy(link)  # with the delays that come
            served = engine.serve()
            best_s, best_blocks = oracle(plain, served.began_s, compute)
            if scene.freezes_at is None:
                regrets.append(served.ttft_s / best_s)
                in_vain += max(0, best_blocks - served.blocks_loaded)
            elif number >= PROMPTS_BEFORE_AN_OUTAGE:
                outage_s += served.ttft_s - best_s
                if cell.policy == ALWAYS:
                    break  # each of them waits as long as the first
    return Outcome(regrets, in_vain / (num_prompts * BLOCKS), outage_s)


def _compute_of(cell: Cell) -> Any:
    from benchmarks.simulated.virtual_engine import Compute

    return Compute(cell.compute_s, prior=PRIOR, answers_s=cell.answers_ms / 1000)


def oracle(link: Any, began_s: float, compute: Any) -> tuple[float, int]:
    """The shortest time to the first token of a prompt, and the blocks that are loaded for it. A
    reply, and the last block of a load, are used when the step ends in which they come."""
    step_s = compute.step_s
    best = compute.rest_s(0, BLOCKS), 0
    if (reply_at := link.reply_at(began_s)) < inf:
        asked_at = began_s + _whole_steps(reply_at - began_s, step_s)
        for number, at in enumerate(link.arrivals(asked_at, BLOCKS), 1):
            if at < inf:
                loaded_s = _whole_steps(at - began_s, step_s)
                best = min(best, (loaded_s + compute.rest_s(number, BLOCKS), number))
    return best


def _whole_steps(seconds: float, step_s: float) -> float:
    return ceil(seconds / step_s - 1e-9) * step_s


def _never(cell: Cell, num_prompts: int, link: Any, compute: Any) -> Outcome:
    if SCENES[cell.scene].freezes_at is not None:
        return Outcome([], 0.0, 0.0)
    regrets, in_vain, now = [], 0, 0.0
    num_prompts = 1 if SCENES[cell.scene].is_first else num_prompts
    for _ in range(num_prompts):
        best_s, blocks = oracle(link, now, compute)
        regrets.append(compute.rest_s(0, BLOCKS) / best_s)
        in_vain += blocks
        now += compute.rest_s(0, BLOCKS)
    return Outcome(regrets, in_vain / (num_prompts * BLOCKS), 0.0)


def _pauses(scene: Scene) -> Iterator[tuple[float, float]]:
    if scene.pauses is not None:
        period_s, stands_s = scene.pauses
        for number in range(1, 1000):
            yield number * period_s, number * period_s + stands_s


def _former_limits(tier: Any) -> None:
    """The limits that the tier had before: 50 ms for a lookup and for a stall, 0.1 s for a request,
    2 s for a load."""
    from dataclasses import dataclass

    from kv_connector.tier.patience import Patience
    from kv_connector.tier.transfers import LoadLimits

    @dataclass(frozen=True)
    class Former(Patience):
        @property
        def floor_s(self) -> float:
            return 0.05

        def wait_s(self, compute_s: float = 0.0) -> float:
            return 0.05

        def reply_s(self, compute_s: float = 0.0) -> float:
            return 0.0

    patience = tier.lookups._patience
    former = Former(patience.config, patience.engine, patience.link)
    tier.lookups._patience = tier.lookups._queries.patience = former
    tier.transfers._limits_of = lambda *_: LoadLimits(0.05, 2.0, 0.0)


def figures_of(found: dict[Cell, Outcome]) -> list[Figure]:
    """For each policy and scene, over all engines and links."""
    figures = []
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in found:
        groups.setdefault((cell.policy, cell.scene), []).append(cell)
    for (policy, scene), cells in groups.items():
        name = f"{policy}: {scene}"
        if scene in OUTAGES:
            shares = [
                found[cell].outage_s / max(1.0, _compute_of(cell).rest_s(0, BLOCKS))
                for cell in cells
            ]
            values = {"share of a prompt, %": 100 * max(shares)}
            figures.append(Figure(name, "of max(prompt, 1 s)", values))
            continue
        regrets = [each for cell in cells for each in found[cell].regrets]
        in_vain = sum(found[cell].in_vain for cell in cells) / len(cells)
        figures.append(
            Figure(name, "to the oracle", _regrets(regrets) | {COLUMNS[3]: 100 * in_vain})
        )
    for policy in dict.fromkeys(cell.policy for cell in found):
        regrets = [each for cell in found if cell.policy == policy for each in found[cell].regrets]
        if regrets:
            figures.append(Figure(f"{policy}: all", "to the oracle", _regrets(regrets)))
    return figures


def _regrets(regrets: Sequence[float]) -> dict[str, float]:
    return {
        "median": percentile(regrets, 50), "p99": percentile(regrets, 99), "worst": max(regrets)
    }  # fmt: skip


def _described(figures: Sequence[Figure]) -> str:
    regrets: list[list[table.Cell]] = [
        [figure.name, *(figure.values.get(column) for column in COLUMNS)]
        for figure in figures if "median" in figure.values
    ]  # fmt: skip
    outages: list[list[table.Cell]] = [
        [figure.name, figure.values["share of a prompt, %"]]
        for figure in figures if "median" not in figure.values
    ]  # fmt: skip
    text = "Time to first token, to that of the oracle, over all engines and links\n"
    text += table.render(["", *COLUMNS], regrets)
    if outages:
        text += "\n\nAn outage costs at most, of the time to compute a prompt, or of 1 s\n"
        text += table.render(["", "%"], outages)
    return text


def chart(record: Record) -> plot.Chart:
    """The regret of each policy, by the server's behaviour."""
    p99: dict[str, dict[str, float]] = {}
    for figure in record.figures:
        policy, _, scene = figure.name.partition(": ")
        if "p99" in figure.values and scene != "all":
            p99.setdefault(policy, {})[scene] = figure.values["p99"]
    scenes = list(dict.fromkeys(scene for each in p99.values() for scene in each))
    series: dict[str, list[float | None]] = {
        policy: [each.get(scene) for scene in scenes] for policy, each in p99.items()
    }
    title = titles.of(record, "time to first token, 99th percentile")
    return plot.bars(title, "times the oracle's", scenes, series, mark=1.0, log=True)


def _parser() -> argparse.ArgumentParser:
    made = options.bare_parser(MODULE, (__doc__ or "").partition("\n")[0])
    add: Callable[..., Any] = made.add_argument
    add("--policies", type=options.names(POLICIES), default=[*POLICIES], metavar="NAMES",
        help=f"some of {', '.join(POLICIES)} (default: all)")  # fmt: skip
    add("--scenes", type=options.names(SCENES), default=[*SCENES], metavar="NAMES",
        help=f"some of {', '.join(SCENES)} (default: all)")  # fmt: skip
    add("--compute-s", type=options.several(float), default=[*COMPUTE_S], metavar="SECONDS",
        help="times to compute a prompt (default: %(default)s)")  # fmt: skip
    add("--link-mb-s", type=options.several(float), default=[*LINK_MB_S], metavar="SPEEDS",
        help="speeds of links, in MB/s (default: %(default)s)")  # fmt: skip
    add("--answers-ms", type=options.several(float), default=[*ANSWERS_MS], metavar="TIMES",
        help="ms of each step for answers of other requests (default: %(default)s)")  # fmt: skip
    add("--prompts", type=options.positive, default=150, metavar="NUMBER",
        help="of each engine (default: %(default)s)")  # fmt: skip
    options.add_files(made)
    return made


if __name__ == "__main__":
    sys.exit(main())
