"""`kvferry slurm` end to end without Ray: success, failure, cancel, time limit, loss of a node, requeue, bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.slurm.jobs import REPOSITORY, Job, command, kvferry, submit, write_config
from tests.slurm.virtual_slurm import VirtualSlurm, wait_for

pytestmark = pytest.mark.slurm

ENDED = ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"]


@pytest.fixture(scope="session")
def limited(slurm: VirtualSlurm, slurm_root: Path) -> Job:
    """A job that will run into its time limit of one minute; submitted first, looked at last."""
    script = "trap 'echo drained; exit 0' TERM; echo started; while :; do sleep 0.2; done"
    folder = slurm_root / "limited"
    folder.mkdir()
    section = {**command("bash", "-c", script), "nodes": 1, "ranks_per_node": 2, "time": "1"}
    config = write_config(folder, "limited", section)
    return submit(slurm, config, "--no-preflight")


def test_success_with_state_logs_and_status(slurm: VirtualSlurm, limited: Job, tmp_path: Path) -> None:
    spaced = tmp_path / "my jobs"  # reaches sbatch, srun and every log's name
    spaced.mkdir()
    job = submit(slurm, write_config(spaced, "fine", command("bash", "-c", "echo hello from $SLURMD_NODENAME")))
    info = slurm.wait_job(job.job_id, ENDED, 60)
    assert (info.state, info.exit_code) == ("COMPLETED", 0), job.log("")
    assert job.state()["phase"] == "ended"
    assert job.state()["exit_code"] == 0
    assert job.failures() == []
    assert "hello from node" in job.log("_command")
    assert [path.name.split("_")[0] for path in sorted((job.folder / "run-0").glob("*.log"))] == ["1", "1", "2"]
    status = kvferry(slurm, "slurm", "status", str(job.job_id), "--json")
    report = json.loads(status.stdout)
    assert (report["slurm_state"], report["exit_code"], report["failures"]) == ("COMPLETED", 0, [])
    assert len(set(report["nodes"])) == 2
    logs = kvferry(slurm, "slurm", "logs", str(job.folder), "--step", "command")
    assert "hello from" in logs.stdout
    ranks = json.loads((job.folder / "allocation.json").read_text())["ranks"]
    assert [(rank["section"], rank["host"]) for rank in ranks] == [
        ("generation_servers", report["nodes"][0]),
        ("context_servers", report["nodes"][1]),
    ]


def test_the_drivers_exit_code_is_the_jobs_and_the_cause_is_kept(slurm: VirtualSlurm, tmp_path: Path) -> None:
    job = submit(slurm, write_config(tmp_path, "bad", command("bash", "-c", "echo the disk is on fire >&2; exit 43")))
    info = slurm.wait_job(job.job_id, ENDED, 60)
    assert (info.state, info.exit_code) == ("FAILED", 43)
    [failure] = job.failures()
    assert (failure["step"], failure["exit_code"], failure["tail"]) == ("command", 43, "the disk is on fire")
    status = kvferry(slurm, "slurm", "status", str(job.job_id))
    assert "FAILED    command on node" in status.stdout
    assert "the disk is on fire" in status.stdout


def test_cancel_lets_the_driver_finish(slurm: VirtualSlurm, tmp_path: Path) -> None:
    script = "trap 'echo finishing; sleep 1; echo finished; exit 0' TERM; echo started; while :; do sleep 0.1; done"
    job = submit(slurm, write_config(tmp_path, "drain", command("bash", "-c", script)))
    wait_for(lambda: "started" in job.log("_command"), "the driver runs", 60)
    done = kvferry(slurm, "slurm", "cancel", str(job.job_id))
    assert "drains" in done.stdout, done.stderr
    info = slurm.wait_job(job.job_id, ENDED, 30)
    assert (info.state, info.exit_code) == ("COMPLETED", 0)
    assert job.log("_command").endswith("finishing\nfinished\n")
    assert job.failures() == []
    again = kvferry(slurm, "slurm", "cancel", str(job.job_id))
    assert (again.returncode, "does not run" in again.stderr) == (1, True)


def test_the_warning_before_the_time_limit_drains(slurm: VirtualSlurm, tmp_path: Path) -> None:
    script = "trap 'echo finished; exit 0' TERM; echo started; while :; do sleep 0.1; done"
    section = {**command("bash", "-c", script), "signal_before_end_s": 30}
    job = submit(slurm, write_config(tmp_path, "warned", section))
    wait_for(lambda: "started" in job.log("_command"), "the driver runs", 60)
    slurm.run(["scancel", "--batch", "--signal=USR1", str(job.job_id)])  # what --signal=B:USR1@30 sends
    info = slurm.wait_job(job.job_id, ENDED, 30)
    assert (info.state, info.exit_code) == ("COMPLETED", 0)
    assert "draining: SIGUSR1 at the batch script" in job.log("_nodes")
    assert job.log("_command").endswith("finished\n")


def test_a_driver_that_ignores_the_drain_is_killed_and_reported(slurm: VirtualSlurm, tmp_path: Path) -> None:
    script = "trap '' TERM; echo started; while :; do sleep 0.1; done"
    section = {**command("bash", "-c", script), "drain_s": 1.0}
    job = submit(slurm, write_config(tmp_path, "stubborn", section))
    wait_for(lambda: "started" in job.log("_command"), "the driver runs", 60)
    kvferry(slurm, "slurm", "cancel", str(job.job_id))
    info = slurm.wait_job(job.job_id, ENDED, 30)
    assert (info.state, info.exit_code) == ("FAILED", 137)
    assert "did not end within 1 s" in job.failures()[0]["cause"]


def test_scancel_tears_down_within_killwait(slurm: VirtualSlurm, tmp_path: Path) -> None:
    script = "trap 'echo told; exit 0' TERM; echo started; while :; do sleep 0.1; done"
    job = submit(slurm, write_config(tmp_path, "scancel", command("bash", "-c", script)))
    wait_for(lambda: "started" in job.log("_command"), "the driver runs", 60)
    slurm.run(["scancel", str(job.job_id)])
    info = slurm.wait_job(job.job_id, ["CANCELLED"], 30)
    assert info.state == "CANCELLED"
    wait_for(lambda: job.state()["phase"] == "ended", "the runner tore down", 10)
    assert "told" in job.log("_command")
    assert "torn down" in job.log("_nodes")


def test_a_job_that_ends_leaves_no_process_on_its_nodes(separate_nodes: VirtualSlurm, tmp_path: Path) -> None:
    script = "setsid sleep 4321 & nohup sleep 4322 & exit 0"
    job = submit(separate_nodes, write_config(tmp_path, "leaver", command("bash", "-c", script)))
    separate_nodes.wait_job(job.job_id, ["COMPLETED"], 60)
    for name in job.state()["nodes"]:
        processes = separate_nodes.run(["ps", "-e", "-o", "args"], on_node=name).stdout
        assert str(job.folder) not in processes
        assert "sleep 432" not in processes


def test_a_lost_node_is_reported_by_name_and_the_job_queued_again(separate_nodes: VirtualSlurm, tmp_path: Path) -> None:
    script = 'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then echo started; sleep 300; else echo second life; fi'
    section = {**command("bash", "-c", script), "nodelist": "node3,node4", "max_requeues": 1}
    job = submit(separate_nodes, write_config(tmp_path, "lost", section))
    wait_for(lambda: "started" in job.log("_command"), "the driver runs", 60)
    separate_nodes.machines.crash("node4")
    wait_for(lambda: bool(job.failures()), "the loss is reported", 30)
    [failure] = job.failures()
    assert (failure["node"], failure["exit_code"]) == ("node4", 75)
    assert "node4 is lost" in failure["cause"]
    separate_nodes.boot("node4")
    info = separate_nodes.wait_job(job.job_id, ["COMPLETED"], 90)
    assert (info.exit_code, info["Restarts"]) == (0, "1")
    assert (job.folder / "run-0" / "2_command.log").read_text() == "started\n"
    assert (job.folder / "run-1" / "2_command.log").read_text() == "second life\n"
    separate_nodes.wait_idle(60)


def test_the_death_of_the_first_node_is_reported_by_the_others(separate_nodes: VirtualSlurm, tmp_path: Path) -> None:
    section = {**command("bash", "-c", "echo started; sleep 300"), "nodelist": "node3,node4"}
    job = submit(separate_nodes, write_config(tmp_path, "headless", section))
    wait_for(lambda: "started" in job.log("_command"), "the driver runs", 60)
    separate_nodes.machines.crash("node3")
    wait_for(lambda: bool(job.failures()), "the loss is reported", 40)
    info = separate_nodes.wait_job(job.job_id, ["NODE_FAIL"], 60)
    status = kvferry(separate_nodes, "slurm", "status", str(job.job_id))
    separate_nodes.boot("node3")
    separate_nodes.wait_idle(60)
    assert info.state == "NODE_FAIL"
    [failure] = job.failures()
    assert (failure["node"], failure["step"], failure["exit_code"]) == ("node3", "running", 75)
    assert "node3 is lost" in failure["cause"]
    assert "FAILED    running on node3: node3 is lost" in status.stdout
    assert "FAILED    slurm on node3: Slurm ended the job (NODE_FAIL" in status.stdout
    assert "while its phase was running; down: node3" in status.stdout


def test_every_error_at_once_and_nothing_submitted(slurm: VirtualSlurm, tmp_path: Path) -> None:
    def jobs() -> set[str]:
        return set(slurm.run(["squeue", "-h", "-t", "all", "-o", "%i"]).stdout.split())

    before = jobs()
    section = {
        "partition": "gpu-big",
        "account": "<account>",
        "nodes": 1,
        "gpus_per_node": 4,
        "venv": "/no/such/venv",
        "log_dir": "/proc/logs",
    }
    servers = {"context_servers": {"num_instances": 2}, "generation_servers": {"tensor_parallel_size": 6}}
    config = write_config(tmp_path, "wrong", section, **servers)
    done = kvferry(slurm, "slurm", "submit", "-c", str(config))
    assert done.returncode == 2
    for expected in (
        "slurm.account: the placeholder <account> is still there",
        "slurm.venv: there is no /no/such/venv/bin/python here",
        "slurm.log_dir: /proc/logs is not writable",
        "slurm.partition: there is no partition 'gpu-big' -> write one of: debug",
        "slurm.nodes: 8 ranks need 2 nodes of 4 (slurm.gpus_per_node), the job asks for 1",
        "generation_servers: tensor_parallel_size x pipeline_parallel_size = 6 ranks do not fill whole nodes of 4",
    ):
        assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert jobs() == before
    assert not (tmp_path / "logs").exists()


def test_ports_and_venv_are_looked_for_on_idle_nodes(separate_nodes: VirtualSlurm, tmp_path: Path) -> None:
    listener = "import socket,time; s=socket.create_server(('', 8123)); time.sleep(60)"
    argv = ["--parsable", "-w", "node2", "-c", "1", "-o", "/dev/null", "--wrap", f'python3 -c "{listener}"']
    holder = int(separate_nodes.run(["sbatch", *argv]).stdout)
    separate_nodes.wait_job(holder, ["RUNNING"], 20)

    def listens() -> bool:
        done = separate_nodes.run(["bash", "-c", "(exec 3<>/dev/tcp/node2/8123)"])
        return done.returncode == 0

    wait_for(listens, "somebody listens on node2", 20)
    config = write_config(tmp_path, "taken", {"nodelist": "node[2-3]"}, server={"port": 8123})
    done = kvferry(separate_nodes, "slurm", "submit", "-c", str(config))
    unasked = submit(separate_nodes, config, "--no-preflight")  # the job's first step looks again
    info = separate_nodes.wait_job(unasked.job_id, ENDED, 60)
    separate_nodes.run(["scancel", str(holder)])
    assert (info.state, info.exit_code) == ("FAILED", 70)
    assert "port 8123 (server.port) is taken on node2" in unasked.failures()[0]["cause"]
    assert done.returncode == 2
    assert "server.port: port 8123 is taken on node2" in done.stderr


def test_dry_run_shows_the_script_and_writes_nothing(slurm: VirtualSlurm, tmp_path: Path) -> None:
    section = {"gpus_per_node": 2, "env": {"UCX_TLS": "tcp"}, "extra_args": ["--exclusive"]}
    config = write_config(tmp_path, "dry", section, context_servers={"num_instances": 3})
    done = kvferry(slurm, "slurm", "submit", "-c", str(config), "--dry-run")
    assert done.returncode == 0, done.stderr
    for expected in (
        "generation_servers 0 rank 0: node 0 slot 0",
        "context_servers 2 rank 0: node 1 slot 1",
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --exclusive",
        "export UCX_TLS=tcp",
    ):
        assert expected in done.stdout
    assert not (tmp_path / "logs").exists()


def test_without_slurm_the_remedy_is_named(slurm: VirtualSlurm, tmp_path: Path) -> None:
    config = write_config(tmp_path, "noslurm", {})
    done = kvferry(slurm, "slurm", "submit", "-c", str(config), PATH="/nowhere")
    assert done.returncode == 2
    assert "commands of Slurm are missing: sbatch" in done.stderr


def test_time_limit_drains(slurm: VirtualSlurm, limited: Job) -> None:
    info = slurm.wait_job(limited.job_id, ["TIMEOUT"], 150)
    assert info.state == "TIMEOUT"
    wait_for(lambda: limited.state()["phase"] == "ended", "the runner tore down", 10)
    assert limited.log("_command").startswith("started\n")
    assert limited.log("_command").endswith("drained\n")


@pytest.mark.parametrize(
    ("script", "arguments", "places"),
    [
        ("slurm/submit.py", ["-c", "slurm/cluster.yaml"], ["server.api_keys_file", "slurm.partition", "slurm.venv"]),
        ("slurm/cache_transceiver_test/submit.py", ["--dry-run"], ["slurm.partition", "slurm.account", "slurm.venv"]),
    ],
)
def test_the_shipped_files_load_and_name_their_placeholders(
    slurm: VirtualSlurm, script: str, arguments: list[str], places: list[str]
) -> None:
    done = slurm.run([sys.executable, script, *arguments], cwd=REPOSITORY, env={"PYTHONPATH": "."})
    assert done.returncode == 2
    for place in places:
        assert f"{place}: the placeholder <" in done.stderr
    assert "unknown key" not in done.stderr
