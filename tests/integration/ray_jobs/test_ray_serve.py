"""The Ray Serve example as a user runs it: `serve start`, `serve run`, a request, `serve shutdown`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.ray_jobs.conftest import REPOSITORY, RayHead, free_ports
from tests.integration.ray_jobs.test_ray_submit import HASH, chat, wait_healthy

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(300)]


def serve(head: RayHead, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ray.serve.scripts", *args]
    done = subprocess.run(argv, cwd=REPOSITORY, env=head.env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_serve_run_answers(ray_head: RayHead, tmp_path: Path) -> None:
    pytest.importorskip("grpc_reflection", reason="needs ray[serve]")
    [port] = free_ports(1)
    config = tmp_path / "cluster.yaml"
    config.write_text(HASH)
    address = ["--address", ray_head.gcs]
    serve(ray_head, "start", *address, "--http-host", "127.0.0.1", "--http-port", str(port))
    try:
        variables = json.dumps({"env_vars": {"KVFERRY_CONFIG": str(config)}})
        run = ["run", *address, "--non-blocking", "--working-dir", ".", "--runtime-env-json", variables]
        serve(ray_head, *run, "examples.ray_serve.app:app")
        wait_healthy(port)
        answer = chat(port)
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["kvferry"]["transport"].startswith("ucx/")
    finally:
        serve(ray_head, "shutdown", "--yes", "--address", ray_head.dashboard)


def test_the_kuberay_manifest_names_what_exists() -> None:
    manifest = yaml.safe_load((REPOSITORY / "examples" / "kuberay" / "rayservice.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    spec = manifest["spec"]
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    source = REPOSITORY / (module.replace(".", "/") + ".py")
    assert f"\n{name} = " in source.read_text()
    groups = spec["rayClusterConfig"]["workerGroupSpecs"]
    offered = {
        group["groupName"]: yaml.safe_load(yaml.safe_load(group["rayStartParams"]["resources"])) for group in groups
    }
    assert offered == {"context": {"kvferry_context": 1}, "generation": {"kvferry_generation": 1}}
    instances = application["runtime_env"]["env_vars"]
    for group in groups:
        role = f"KVFERRY_{group['groupName'].upper()}_SERVERS__NUM_INSTANCES"
        assert int(instances[role]) == group["replicas"]
