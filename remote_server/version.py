"""The version of this package."""

from importlib import metadata


def version() -> str:
    """Of the installed package, such as `0.2.0`; `not installed` for a bare folder of it."""
    try:
        return metadata.version("kvferry")
    except metadata.PackageNotFoundError:
        return "not installed"
