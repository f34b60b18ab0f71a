"""The examples that add kvferry to the engines of other projects: fields that exist, settings that
are valid, and a result that Kubernetes takes.

`schemas/production-stack.json` has the types of the values used here, from the chart's own schema
(`helm/values.schema.json`, Apache-2.0), and no other value is allowed.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from test_kubernetes_example import BASE, EXAMPLE, SCHEMA, Object, objects_of

from kv_connector.config import ConnectorConfig, read_config
from remote_server.fleet.server_list import read_list

CHART = json.loads((Path(__file__).parent / "schemas" / "production-stack.json").read_text())
(VALUES,) = objects_of("production_stack.yaml")
(COMPONENT,) = objects_of("llm_d/kustomization.yaml")
(PATCH,) = objects_of("llm_d/engine.yaml")

GUIDE: Object = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "precise-prefix-cache-aware-nvidia-gpu-vllm-decode"},
    "spec": {"template": {"spec": {
        "containers": [{
            "name": "modelserver", "image": "vllm/vllm-openai",
            "args": ["MODEL", "--kv-events-config", "{}"],
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }}},
}  # fmt: skip
"""The parts of a guide's Deployment that the patch touches."""


def added(document: Object, patch: list[Object]) -> Object:
    """The operations `add` at the ends of lists, as JSON Patch (RFC 6902) has them."""
    result = json.loads(json.dumps(document))
    for one in patch:
        assert one["op"] == "add"
        *way, last = one["path"].strip("/").split("/")
        assert last == "-"
        here: Any = result
        for step in way:
            here = here[int(step)] if isinstance(here, list) else here[step]
        here.append(one["value"])
    return result


def errors_in(document: Any, kind: str) -> list[str]:
    validator = jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{kind}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def pod_of_production_stack() -> Object:
    """The parts of the values that the chart copies into its pods."""
    (model,) = VALUES["servingEngineSpec"]["modelSpec"]
    return {
        "containers": [{
            "name": "vllm", "args": model["vllmConfig"]["extraArgs"], "env": model["env"],
            "volumeMounts": model["extraVolumeMounts"],
        }],
        "volumes": model["extraVolumes"],
    }  # fmt: skip


def pod_of_llm_d() -> Object:
    spec: Object = added(GUIDE, PATCH)["spec"]["template"]["spec"]
    return spec


PODS = {"production stack": pod_of_production_stack(), "llm-d": pod_of_llm_d()}


@pytest.fixture(params=PODS)
def pod(request: pytest.FixtureRequest) -> Object:
    return PODS[request.param]


def test_the_chart_knows_every_value():
    jsonschema.Draft202012Validator(CHART).validate(VALUES)


def test_the_component_patches_the_engines_of_the_guides_with_a_file_that_is_there():
    (patch,) = COMPONENT["patches"]
    assert (EXAMPLE / "llm_d" / patch["path"]).exists()
    assert patch["target"]["kind"] == GUIDE["kind"]
    assert GUIDE["metadata"]["name"].endswith(patch["target"]["name"].removeprefix(".*"))


def test_kubernetes_takes_the_pod(pod: Object):
    assert errors_in(pod, "io.k8s.api.core.v1.PodSpec") == []


def test_the_engine_uses_the_servers_of_the_example_and_publishes_their_blocks(pod: Object):
    args = pod["containers"][0]["args"]
    connector = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert connector["kv_connector"] == "KVFerryConnector"
    config = read_config(ConnectorConfig, connector["kv_connector_extra_config"], "here")
    assert config.kv_events and "--kv-events-config" in args
    stateful_set = BASE["StatefulSet"]
    assert isinstance(config.server, str)
    assert [one.name for one in read_list(config.server).members] == [
        f"kvferry-{number}" for number in range(stateful_set["spec"]["replicas"])
    ]


def test_the_clients_key_is_mounted_where_the_setting_has_it(pod: Object):
    container = pod["containers"][0]
    args = container["args"]
    setting = json.loads(args[args.index("--kv-transfer-config") + 1])
    (keys,) = {
        one.keys
        for one in read_list(setting["kv_connector_extra_config"]["server"]).members
    }  # fmt: skip
    folder, _, name = keys.rpartition("/")
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts[folder]]["secret"]["defaultMode"] == 0o400
    assert f"--from-file=examples/kubernetes/keys/{name}" in (
        (EXAMPLE / "production_stack.yaml").read_text()
    )
