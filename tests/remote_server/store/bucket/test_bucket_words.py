"""Words about a bucket for people: one line that names the reason, and never a secret."""

import pytest

from remote_server.cli.__main__ import main
from remote_server.plain_text import without_secrets
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import BucketError, Failure

SECRET = "wJalrXUtnFEMI"
ADDRESSES = [
    f"s3://AKIA:{SECRET}@blocks/kv",
    f"gs://{SECRET}@blocks/kv",
    f"az://container/kv?sv=2024&sig={SECRET}&se=2030",
    f"s3://blocks/kv?aws_secret_access_key={SECRET}",
    f"http://AKIA:{SECRET}@blocks/kv?sig={SECRET}",
]


@pytest.mark.parametrize(
    ("source", "address"),
    [*(("flag", address) for address in ADDRESSES), ("variable", ADDRESSES[0]),
     ("file", ADDRESSES[0])],
)  # fmt: skip
def test_a_credential_in_an_address_is_refused_and_printed_nowhere(
    address, source, monkeypatch, capsys, caplog, tmp_path
):
    flags = ["--print-config"]
    if source == "flag":
        flags.append(f"--bucket={address}")
    elif source == "variable":
        monkeypatch.setenv("KVFERRY_BUCKET", address)
    else:
        (tmp_path / "kvferry.toml").write_text(f'bucket = "{address}"\n')
        flags.append(f"--settings={tmp_path / 'kvferry.toml'}")
    assert main(["serve", *flags]) == 2
    out, err = capsys.readouterr()
    assert "bucket: " in err and "***" in err
    assert SECRET not in out + err + caplog.text


def test_a_text_that_is_no_address_hides_its_secret_too(capsys):
    assert main(["serve", "--print-config", f"--bucket=s3://a:{SECRET}@b/\udcff"]) == 2
    assert SECRET not in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["s3://", "s3:///kv", "s3://[", "file://", "file:///", "file:////", "blocks", ""]
)
def test_an_address_without_a_bucket_is_wrong_usage(address, capsys):
    assert main(["serve", "--print-config", f"--bucket={address}"]) == (2 if address else 0)


def test_only_user_password_and_query_of_an_address_are_hidden():
    text = "GET http://a:b@127.0.0.1:9000/x/y?sig=1 failed, and key@host is a name"
    assert without_secrets(text) == (
        "GET http://***@127.0.0.1:9000/x/y?*** failed, and key@host is a name"
    )


def test_a_store_that_refuses_connections_is_unreachable_and_not_late(monkeypatch):
    for name, value in {
        "AWS_ENDPOINT": f"http://user:{SECRET}@127.0.0.1:1", "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "r",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(BucketError) as caught:
        StoreObjects("s3://blocks/kv").read("a", 0, 3)
    assert caught.value.failure is Failure.UNREACHABLE
    assert "Connection refused" in str(caught.value) and SECRET not in str(caught.value)
