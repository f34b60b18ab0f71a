"""`python -m kv_connector.settings_page docs/SETTINGS.md`: the tables, from the docstrings.

Rewrites what stands between the markers of each table and leaves the rest of the page alone.
"""

import sys
from pathlib import Path

import msgspec

from kv_connector.config import ConnectorConfig
from remote_server.config import ServerConfig
from remote_server.settings_text import table

TABLES: dict[str, type[msgspec.Struct]] = {"server": ServerConfig, "connector": ConnectorConfig}


def rewritten(page: str) -> str:
    """`page` with every table as the code has it now."""
    for name, kind in TABLES.items():
        begin, end = f"<!-- {name} settings -->", f"<!-- end of {name} settings -->"
        between = "\n".join([begin, *table(kind), end])
        before, _, rest = page.partition(begin)
        page = before + between + rest.partition(end)[2]
    return page


def main() -> None:
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text()))


if __name__ == "__main__":
    main()
