"""The documentation site builds, every link leads somewhere, and its navigation has every page."""

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed")

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / ".ci" / "site.py"


@pytest.fixture
def site(monkeypatch, tmp_path):
    """The script, with the folders of its copies in `tmp_path`."""
    spec = importlib.util.spec_from_file_location("site_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = (ROOT / "docs" / "mkdocs.yml").read_text()
    config = config.replace("../build/site-src", str(tmp_path / "pages"))
    (tmp_path / "mkdocs.yml").write_text(config.replace("../build/site", str(tmp_path / "site")))
    monkeypatch.setattr(module, "SOURCES", tmp_path / "pages")
    monkeypatch.setattr(module, "CONFIG", tmp_path / "mkdocs.yml")
    return module


def test_the_site_builds_without_a_wrong_link_and_loads_nothing_from_elsewhere(
    site, tmp_path, capsys
):
    assert site.main([str(tmp_path / "out")]) == 0, capsys.readouterr().out
    front = (tmp_path / "out" / "index.html").read_text()
    loaded = re.findall(r'<(?:script|link)[^>]+(?:src|href)="([^"]+)"', front)
    assert loaded and not [one for one in loaded if "//" in one]
    assert (tmp_path / "out" / "search" / "search_index.json").exists()


@pytest.mark.parametrize("link", ["[x](nowhere.md)", "[x](docs/start.md#nothing)"])
def test_a_link_that_leads_nowhere_ends_the_build_and_is_named(
    site, tmp_path, capsys, monkeypatch, link
):
    gather = site.gather

    def with_it():
        gather()
        with (tmp_path / "pages" / "README.md").open("a") as page:
            page.write(link)

    monkeypatch.setattr(site, "gather", with_it)
    assert site.main([str(tmp_path / "out")]) == 1
    assert link.split("(")[1].split("#")[0].rstrip(")") in capsys.readouterr().out


def test_the_navigation_has_every_document(site):
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)
    pages = {str(page) for page in site.pages() if not str(page).startswith("benchmarks/")}
    assert sorted(named) == sorted(pages | {"benchmarks/README.md"})
