"""`kvferry unpin`: let pinned blocks be evicted again."""

from functools import partial

from remote_server.cli.blocks import pin
from remote_server.cli.parser import Command

COMMAND = Command(
    pin.add_flags,
    partial(pin.run, keep=False),
    description="Undo pin. Exit status 1 when nothing was pinned.",
    examples="""\
kvferry unpin NAME
""",
)
