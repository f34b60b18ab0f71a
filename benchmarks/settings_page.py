"""`python -m benchmarks.settings_page docs/settings.md`: writes the tables from the docstrings.

It replaces the text between the markers of each table.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kv_connector.config import ConnectorConfig
from remote_server.server.config import ServerConfig
from remote_server.server.settings import table

TABLES: dict[str, type[msgspec.Struct]] = {"server": ServerConfig, "connector": ConnectorConfig}


def rewritten(page: str) -> str:
    """`page` with every table replaced by the present one."""
    for name, kind in TABLES.items():
        begin, end = f"<!-- {name} settings -->", f"<!-- end of {name} settings -->"
        between = "\n".join([begin, *table(kind), end])
        before, _, rest = page.partition(begin)
        page = before + between + rest.partition(end)[2]
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.settings_page",
        description="Write the tables of settings into a page, from their docstrings.",
    )
    parser.add_argument("page", type=Path, metavar="PAGE.md", help="rewritten in place")
    page: Path = parser.parse_args(arguments).page
    page.write_text(rewritten(page.read_text()))


if __name__ == "__main__":
    main()
