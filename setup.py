"""The build of the C library, for setuptools. pyproject.toml has all declarations."""

import importlib.util
from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

PACKAGE = Path("remote_server", "native")

# By its path: where setuptools runs this, the packages cannot be imported.
_spec = importlib.util.spec_from_file_location(
    "build_native", Path(__file__).parent / PACKAGE / "build.py"
)
native = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)


class BuildNative(Command):
    """Compile the library into the folder of the build; for an editable install into the tree."""

    description = f"compile {native.LIBRARY}, where there is a compiler"
    user_options: ClassVar = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        folder = native.SOURCES if self.editable_mode else Path(self.build_lib, PACKAGE)
        folder.mkdir(parents=True, exist_ok=True)
        print(native.build(folder / native.LIBRARY).line, flush=True)

    def get_source_files(self) -> list[str]:
        return []  # pyproject.toml lists them: the wheel has them too

    def get_outputs(self) -> list[str]:
        return []  # in an editable install it is no file of the wheel

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_native", None)]


class BdistWheel(bdist_wheel):
    """A wheel for every Python 3, and for the hosts where its library can be loaded."""

    def get_tag(self) -> tuple[str, str, str]:
        """Called when all files are in place, before those that describe the wheel are written."""
        library = Path(self.bdist_dir, PACKAGE, native.LIBRARY)
        if not library.exists():
            return super().get_tag()
        self.root_is_pure = False
        platform = self.plat_name if self.plat_name_supplied else native.platform_of(library)
        return "py3", "none", platform.replace("-", "_").replace(".", "_")


setup(cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": BdistWheel})
