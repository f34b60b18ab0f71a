import re

import pytest

from remote_server.errors import ConfigError
from remote_server.process_limits import check_memory_fits
from remote_server.server.config import ServerConfig
from remote_server.values import GiB, KiB, MiB, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("512MiB", 512 * MiB), ("1GB", 10**9), ("1.5GiB", 3 * GiB // 2), ("4096", 4096),
     (" 2 gib ", 2 * GiB), ("7b", 7), (123, 123), ("1kb", 1000), ("1KiB", 1024)],
)  # fmt: skip
def test_a_size_is_read_as_people_write_it(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 XiB", "1GiBs", "1e9", "0x10", "ten"])
def test_a_bad_size_is_refused_with_its_setting_and_value(text):
    with pytest.raises(ConfigError, match=f"^memory: {text!r} is not a size"):
        parse_bytes(text, "memory")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"memory": 1000}, "memory: 1000 bytes is below"),
        ({"memory": -1}, "memory: -1 bytes"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s: -1"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s: nan"),
        ({"disk_write_rate": -1}, "disk_write_rate: -1 bytes per second"),
        ({"disk_admit": "often"}, "disk_admit: 'often' is none of all, twice"),
        ({"log_level": "loud"}, "log_level: 'loud'"),
    ],
)
def test_a_bad_setting_is_refused_by_name(fields, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        ServerConfig(**fields)


def test_an_address_others_can_reach_needs_insecure():
    assert ServerConfig().bind == "tcp://127.0.0.1:5757"
    for bind in ("tcp://127.0.0.1:*", "tcp://localhost:80", "tcp://[::1]:5757"):
        assert not ServerConfig(bind=bind).insecure
    for bind in ("tcp://0.0.0.0:5757", "tcp://*:5757", "tcp://10.0.0.7:*", "tcp://[::]:5757",
                 "tcp://127.example.com:5757"):  # fmt: skip
        with pytest.raises(ConfigError, match="--insecure"):
            ServerConfig(bind=bind)
        assert ServerConfig(bind=bind, insecure=True).bind == bind


@pytest.fixture
def machine(tmp_path):
    """A fake /proc and /sys/fs/cgroup: 4 GiB available, and whatever limits a test writes."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {4 * GiB // KiB} kB\n")

    def limit(line: str, file: str, text: str):
        (proc / "self" / "cgroup").write_text(line + "\n")
        (cgroups / file).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / file).write_text(text + "\n")

    return proc, cgroups, limit


def test_a_budget_larger_than_the_machine_names_both_numbers(machine):
    proc, cgroups, limit = machine
    for limited in (False, True):
        if limited:
            limit("0::/", "memory.max", "max")
        check_memory_fits(4 * GiB, proc, cgroups)
        with pytest.raises(ConfigError, match=r"5\.0 GiB.*4\.0 GiB"):
            check_memory_fits(5 * GiB, proc, cgroups)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/", "memory.max"),
        ("0::/pod/box", "pod/box/memory.max"),
        ("0::/pod/box", "pod/memory.max"),
        ("4:memory:/box", "memory/box/memory.limit_in_bytes"),
        ("4:cpu,memory:/box", "memory/memory.limit_in_bytes"),
    ],
)
def test_a_budget_larger_than_the_container_names_both_numbers(machine, line, file):
    proc, cgroups, limit = machine
    limit(line, file, str(2 * GiB))
    check_memory_fits(2 * GiB, proc, cgroups)
    with pytest.raises(ConfigError, match=r"3\.0 GiB.*2\.0 GiB"):
        check_memory_fits(3 * GiB, proc, cgroups)
