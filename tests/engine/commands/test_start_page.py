"""Every command of README and of docs/start.md, typed in the order of the page."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.processes import free_port
from remote_server.cli.__main__ import main

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]


def fences(page: str) -> list[str]:
    """The blocks of commands, as they stand there."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def typed(script: str, cwd: Path, **variables: str) -> str:
    """What a shell prints for it, errors included; every process that it starts is ended."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": programs, "PYTHONPATH": str(ROOT), **variables}
    with subprocess.Popen(
        ["bash", "-u", "-c", script], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as shell:  # fmt: skip
        try:
            printed, _ = shell.communicate(timeout=800)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
    return printed


def on_free_ports(script: str) -> str:
    """With ports of this test in place of those of the page."""
    for port in ("5757", "8000"):
        script = script.replace(port, str(free_port()))
    return script


def usages(printed: str) -> list[int]:
    """How many prompt tokens were cached, answer by answer."""
    return [int(found) for found in re.findall(r'"cached_tokens":(\d+)', printed)]


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_every_target_of_make_on_the_page_is_one(page: str):
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"^make ([a-z-]+)$", "".join(fences(page)), re.MULTILINE)
    assert named and [name for name in named if f"\n{name}: " not in makefile] == []


def test_the_start_page_leads_to_a_hit_after_a_restart(model: Path, tmp_path: Path):
    _, enter, *steps = fences("docs/start.md")
    assert enter.startswith("source .venv/bin/activate\n")
    script = "".join(steps).replace("Qwen/Qwen2.5-0.5B-Instruct", str(model))
    assert str(model) in script
    script = on_free_ports(script)
    address = re.findall(r'"server": "([^"]+)"', script)[0]
    elsewhere = {"KVFERRY_BIND": address, "KVFERRY_SERVER": address, "KVFERRY_ADMIN": "off"}
    printed = typed(script, tmp_path, **elsewhere)
    (tmp_path / "printed").write_text(printed)
    log = (tmp_path / "engine.log").read_text()[-3000:]
    assert len(usages(printed)) == 3, printed + log
    first, second, third = usages(printed)
    assert first == 0 and second == third > 1000, printed
    reused = re.search(r'^kvferry_reused_tokens_total\{.*level="server".*\} ([\d.]+)', printed,
                       re.MULTILINE)  # fmt: skip
    assert reused is not None and float(reused[1]) == third, printed
    assert "start-up canary passed" in printed, printed
    assert "1 namespaces, no two nearly equal" in printed, printed
    assert "Traceback" not in printed and "command not found" not in printed, printed


def test_the_readme_serves_and_its_engine_answers(model: Path, tmp_path: Path):
    """Its second block, but for the installation, with a server and a pool of little memory."""
    _, block = fences("README.md")
    install, serve, rest = block.split("\n", 2)
    assert (install, serve) == ("pip install .", "kvferry serve --memory 16GiB")
    serve, vllm = serve.replace("16GiB", "64MiB"), rest.strip().replace("MODEL", str(model))
    for_a_cpu = (
        "--port 8000 --dtype bfloat16 --max-model-len 2048 --enforce-eager "
        "--kv-cache-memory-bytes 268435456"
    )
    vllm = vllm.replace("8GiB", "64MiB")
    script = on_free_ports(f"""
{serve} --bind 127.0.0.1:5757 > server.log 2>&1 & SERVER=$!
{vllm} {for_a_cpu} > engine.log 2>&1 & ENGINE=$!
until curl -sf http://127.0.0.1:8000/health; do kill -0 $ENGINE || break; sleep 0.05; done
curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
    -d '{{"model": {shlex.quote(f'"{model}"')[1:-1]}, "prompt": "a", "max_tokens": 2}}'
kvferry why --server 127.0.0.1:5757
kvferry top --once --every-s 0.1 --server 127.0.0.1:5757
kvferry doctor --server 127.0.0.1:5757 --json
kill $ENGINE; wait $ENGINE; kill $SERVER; wait $SERVER
""")
    printed = typed(script, tmp_path, KVFERRY_ADMIN="off")
    assert '"text"' in printed, printed + (tmp_path / "engine.log").read_text()[-3000:]
    assert "found" in printed and '"check": "vLLM"' in printed.replace('":"', '": "')
    assert "Traceback" not in printed and "command not found" not in printed, printed


def test_the_engine_and_the_server_that_init_writes_find_each_other(model: Path, tmp_path: Path):
    folder = tmp_path / "made"
    typed_init = ["init", str(folder), "--model", str(model), "--device", "cpu", "--keys", "blue"]
    assert main([*typed_init, "--memory", "64MiB", "--cpu-pool", "64MiB"]) == 0
    port = str(free_port())
    for name in ("kvferry.toml", "vllm.sh"):
        file = folder / name
        file.write_text(file.read_text().replace("5757", port))
    key = folder / "keys" / "client-blue.key"
    script = on_free_ports(f"""
kvferry serve --settings {folder}/kvferry.toml > server.log 2>&1 & SERVER=$!
sh {folder}/vllm.sh --port 8000 --max-model-len 2048 --enforce-eager --kv-cache-memory-bytes \
    268435456 > engine.log 2>&1 & ENGINE=$!
until curl -sf http://127.0.0.1:8000/health; do kill -0 $ENGINE || break; sleep 0.05; done
kvferry why --server '127.0.0.1:{port}?keys={key}'
kill $ENGINE; wait $ENGINE; kill $SERVER; wait $SERVER
grep -o 'start-up canary [a-z]*' engine.log
""")
    printed = typed(script, tmp_path, KVFERRY_ADMIN="off")
    assert "start-up canary passed" in printed, (tmp_path / "engine.log").read_text()[-3000:]
    assert "no two of them are nearly equal" in printed or "1 namespace" in printed, printed


@pytest.mark.whole
@pytest.mark.parametrize("module", ["examples.demo", "examples.router_demo"])
def test_the_demonstrations_end_well(module: str, tmp_path: Path):
    ran = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
