"""A figure in prose equals the record that it is from."""

from pathlib import Path

import pytest

from benchmarks.harness.commands import registry
from benchmarks.harness.pages import claims, readmes
from benchmarks.harness.pages.claims import Claim
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Sample

CLAIMS = claims.read(registry.REPOSITORY / "benchmarks" / "claims.toml")
RECORD = Record(
    "b",
    "c",
    parameters={"requests": 12},
    rows=[Row("m", "slow", 1, Sample([3.0])), Row("m", "fast", 1, Sample([2.0]))],
    figures=[Figure("found", "%", {"learned": 16.474})],
)


@pytest.mark.parametrize(
    ("text", "value", "made"),
    [
        ("it finds {v:.1f} %", "found | learned", "it finds 16.5 %"),
        ("{v:.1f} times as fast", "fast / slow", "1.5 times as fast"),
        ("{v:.0f} requests", "requests", "12 requests"),
    ],
)
def test_a_text_is_made_of_the_record(text: str, value: str, made: str) -> None:
    claim = Claim(page="p", text=text, record="r", values={"v": value})
    assert claims.text_of(claim, RECORD) == made


@pytest.mark.parametrize("value", ["found | lru", "nothing | learned", "fast / none", "none"])
def test_a_value_that_the_record_lacks_is_an_error(value: str) -> None:
    with pytest.raises(LookupError):
        claims.text_of(Claim(page="p", text="{v}", record="r", values={"v": value}), RECORD)


def test_every_claim_of_the_project_is_what_its_record_gives() -> None:
    assert [*claims.complaints(registry.REPOSITORY)] == []
    assert {claim.page for claim in CLAIMS} >= {"README.md", "docs/reliability.md"}


def test_a_sentence_whose_record_was_made_again_is_named(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    RECORD.write(results / "r.json")
    (tmp_path / "README.md").write_text("Behind the pool it finds\n17.0 %.\n")
    (tmp_path / "benchmarks" / "claims.toml").write_text(
        '[[claim]]\npage = "README.md"\ntext = "it finds {v:.1f} %"\nrecord = "r.json"\n'
        'values = { v = "found | learned" }\n'
    )
    assert next(readmes.complaints(tmp_path)) == (
        "README.md: by r.json it must read: it finds 16.5 %"
    )
    (tmp_path / "README.md").write_text("Behind the pool it finds\n16.5 %.\n")
    assert [*claims.complaints(tmp_path)] == []


@pytest.mark.parametrize(
    ("page", "is_right"),
    [("16.5 % is found", True), ("(16.5 %)", True), ("to 16.5 % of", True),
     ("116.5 % is found", False), ("1,16.5 % is found", False), ("2.16.5 % is found", False)],
)  # fmt: skip
def test_the_end_of_a_longer_number_is_another_figure(
    page: str, is_right: bool, tmp_path: Path
) -> None:
    """A sentence with 116.5 % was right for a record with 16.5."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    RECORD.write(results / "r.json")
    (tmp_path / "README.md").write_text(page)
    (tmp_path / "benchmarks" / "claims.toml").write_text(
        '[[claim]]\npage = "README.md"\ntext = "{v:.1f} %"\nrecord = "r.json"\n'
        'values = { v = "found | learned" }\n'
    )
    assert ([*claims.complaints(tmp_path)] == []) is is_right


@pytest.mark.parametrize(
    ("page", "text", "record"),
    [("NONE.md", "{v:.1f}", "r.json"), ("README.md", "{v:.1q}", "r.json"),
     ("README.md", "{w}", "r.json"), ("README.md", "{v}", "none.json")],
)  # fmt: skip
def test_a_claim_that_cannot_be_checked_is_named_and_the_next_is_checked(
    page: str, text: str, record: str, tmp_path: Path
) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    RECORD.write(results / "r.json")
    (tmp_path / "README.md").write_text("17.0 %")
    (tmp_path / "benchmarks" / "claims.toml").write_text("".join(
        f'[[claim]]\npage = "{page}"\ntext = "{text}"\nrecord = "{record}"\n'
        'values = { v = "found | learned" }\n'
        for page, text, record in ((page, text, record), ("README.md", "{v:.1f} %", "r.json"))
    ))  # fmt: skip
    first, second = claims.complaints(tmp_path)
    assert repr(text) in first and second == "README.md: by r.json it must read: 16.5 %"
