"""The sbatch script, the job's folder, its report and the section's own rules."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, ConfigError, load_config
from cluster.config.slurm_config import SlurmConfig
from cluster.launch import (
    Failure,
    JobFolder,
    JobNotFoundError,
    JobPhase,
    JobState,
    LaunchConfigError,
    Partition,
    SlurmClient,
    SlurmJob,
    allocate,
    find_job_folder,
    render_script,
    report_job,
    submit_job,
)


def script_of(**slurm: object) -> str:
    config = ClusterConfig(model="hash", slurm=SlurmConfig(partition="p", **slurm))  # type: ignore[arg-type]
    assert config.slurm is not None
    allocation, _ = allocate(config, config.slurm)
    return render_script(config.slurm, allocation, Path("/shared/my jobs/one"))


def test_the_script_is_valid_bash_with_every_blank_filled() -> None:
    script = script_of(env={"MESSAGE": "it's; $HOME"}, extra_args=("--exclusive",), signal_before_end_s=45)
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "@" not in script.replace("B:USR1@45", "").replace("[@]", "")
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --nodes=2" in lines
    assert "#SBATCH --signal=B:USR1@45" in lines
    assert "#SBATCH --no-requeue" in lines
    assert "export MESSAGE='it'\"'\"'s; $HOME'" in lines


def test_a_container_replaces_the_venv() -> None:
    script = script_of(container_image="registry/kvferry:1", container_mounts=("/shared:/shared",), max_requeues=2)
    assert "--container-image=registry/kvferry:1 --container-mounts=/shared:/shared" in script
    assert "python3 -m cluster.launch.slurm_task" in script
    assert "#SBATCH --requeue" in script


def test_a_space_in_the_folder_stays_inside_its_directive() -> None:
    directives = [shlex.split(line.removeprefix("#SBATCH ")) for line in script_of().splitlines() if "#SBATCH" in line]
    assert ["--output=/shared/my jobs/one/0_batch.log"] in directives
    assert ["--comment=kvferry:/shared/my jobs/one"] in directives
    assert all(len(words) == 1 for words in directives)


def test_rules_of_the_section(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("slurm: {partition: '', time: tomorrow, gpus_per_node: -1, partitoin: x, ray: {port: 80}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    for expected in (
        "slurm.partition",
        "slurm.time",
        "slurm.gpus_per_node",
        "did you mean slurm.partition?",
        "slurm.ray.port",
    ):
        assert expected in text
    with pytest.raises(ValueError, match="exclude each other"):
        SlurmConfig(partition="p", venv="/v", container_image="i")
    with pytest.raises(ValueError, match="leaves nothing to run"):
        SlurmConfig(partition="p", ray={"enabled": False})  # type: ignore[arg-type]


def test_logs_are_numbered_in_the_order_of_their_first_use(tmp_path: Path) -> None:
    run = JobFolder(tmp_path).run(0)
    names = [run.log("nodes", "a").name, run.log("ray", "a").name, run.log("ray", "b").name, run.log("serve").name]
    assert names == ["1_nodes-a.log", "2_ray-a.log", "2_ray-b.log", "3_serve.log"]
    for name in (*names, "10_client-7.log"):
        (run.path / name).touch()
    assert [log.name for log in JobFolder(tmp_path).logs()] == [*names, "10_client-7.log"]


def test_the_report_names_every_failure(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, clock=lambda: 0.0)
    folder.write_state(JobState(JobPhase.ENDED, 0.0, 1, ("n1", "n2"), exit_code=75))
    folder.add_failure(Failure(0.0, 1, "n2", "running", "n2 is lost: power", 75, "/logs/x", "last words"))
    with (tmp_path / "failures.jsonl").open("a") as file:
        file.write('{"half": ')
    job = SlurmJob(7, "FAILED", "NonZeroExitCode", 75, 1, "n[1-2]", "00:01:00", "01:00:00", "")
    text = "\n".join(report_job(folder, job).lines())
    for expected in (
        "job 7 FAILED (NonZeroExitCode)",
        "restarted 1 times",
        "exit code 75",
        "running on n2",
        "last words",
    ):
        assert expected in text
    assert "unreadable line" in text
    assert "does not know this job" in "\n".join(report_job(folder, None).lines())


def slurm_job(state: str, reason: str = "None", exit_code: int = 0) -> SlurmJob:
    return SlurmJob(7, state, reason, exit_code, 0, "n[1-2]", "00:01:00", "01:00:00", "")


def test_a_job_that_slurm_ended_unheard_has_failed(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, clock=lambda: 0.0)
    folder.write_state(JobState(JobPhase.READY, 0.0, 0, ("n1", "n2"), url="http://n1:8000"))
    report = report_job(folder, slurm_job("NODE_FAIL"), ["n1"])
    text = "\n".join(report.lines())
    assert "FAILED    slurm on n1: Slurm ended the job (NODE_FAIL) while its phase was ready; down: n1" in text
    assert "url" not in text
    assert [failure["step"] for failure in report.to_dict()["failures"]] == ["slurm"]
    [failure] = report_job(folder, slurm_job("OUT_OF_MEMORY", "OutOfMemory", 9)).failures
    assert (failure.node, failure.exit_code) == ("n[1-2]", 9)
    assert "(OUT_OF_MEMORY, OutOfMemory)" in failure.cause
    for state in ("RUNNING", "PENDING", "COMPLETING"):
        assert report_job(folder, slurm_job(state)).failures == ()
    folder.write_state(JobState(JobPhase.SUBMITTED, 0.0))
    assert report_job(folder, slurm_job("CANCELLED")).failures == ()  # in the queue
    folder.write_state(JobState(JobPhase.ENDED, 0.0, exit_code=0))
    assert report_job(folder, slurm_job("TIMEOUT")).failures == ()


def test_down_nodes_are_those_that_slurm_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(_self: SlurmClient, argv: list[str], _timeout_s: float | None = None) -> str:
        asked.append(argv)
        return "n1|down*\nn1|down*\nn2|idle\nn3|mixed*\nn4|drained\n"

    monkeypatch.setattr(SlurmClient, "_run", run)
    assert SlurmClient().down_nodes(["n1", "n2", "n3", "n4"]) == ["n1", "n3"]
    assert "n1,n2,n3,n4" in asked[0]
    assert (SlurmClient().down_nodes([]), len(asked)) == ([], 1)


def test_a_folder_is_found_by_id_comment_or_path(tmp_path: Path) -> None:
    folder = tmp_path / "20260101-000000-x"
    folder.mkdir()
    (folder / "submission.json").write_text('{"job_id": 12}')
    assert find_job_folder(tmp_path, "12").path == folder
    assert find_job_folder(Path("/nowhere"), "99", f"kvferry:{folder}").path == folder
    assert find_job_folder(Path("/nowhere"), str(folder)).path == folder
    with pytest.raises(JobNotFoundError, match="no folder of job 13"):
        find_job_folder(tmp_path, "13")


class FakeSlurm(SlurmClient):
    """Answers without Slurm; records what is submitted."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[Path] = []

    def missing_commands(self) -> list[str]:
        return []

    def partitions(self) -> dict[str, Partition]:
        return {"p": Partition("p", nodes=4, idle=1, gpus=2)}

    def submit(self, script: Path, args: object = ()) -> int:
        self.submitted.append(script)
        return 31


def test_submission_writes_the_folder_and_names_the_busy_nodes(tmp_path: Path) -> None:
    slurm = SlurmConfig(partition="p", work_dir=str(tmp_path))
    client = FakeSlurm()
    done = submit_job(ClusterConfig(model="hash", slurm=slurm), name="my cluster", client=client, clock=lambda: 0.0)
    assert done.job_id == 31
    assert client.submitted == [done.folder / "job.sbatch"]
    assert "only 1 nodes are idle" in done.notes[0]
    assert load_config(done.folder / "config.yaml").slurm == slurm
    assert (done.folder / "ray_token").stat().st_mode & 0o077 == 0
    again = submit_job(ClusterConfig(model="hash", slurm=slurm), name="my cluster", client=client, clock=lambda: 0.0)
    assert again.folder != done.folder


def test_a_cluster_without_the_section_is_refused() -> None:
    with pytest.raises(LaunchConfigError, match="add `slurm:`"):
        submit_job(ClusterConfig(model="hash"), name="x", client=FakeSlurm())


def test_more_nodes_and_gpus_than_the_partition_has(tmp_path: Path) -> None:
    slurm = SlurmConfig(partition="p", nodes=9, gpus_per_node=8, work_dir=str(tmp_path))
    with pytest.raises(LaunchConfigError) as caught:
        submit_job(ClusterConfig(model="hash", slurm=slurm), name="x", client=FakeSlurm())
    assert [problem.path for problem in caught.value.problems] == ["slurm.nodes", "slurm.gpus_per_node"]
    assert list(tmp_path.iterdir()) == []


@contextmanager
def nobody() -> Iterator[None]:
    """Give up root's right to enter every folder, for a test that runs as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def problems_of(slurm: SlurmConfig) -> list[str]:
    with pytest.raises(LaunchConfigError) as caught:
        submit_job(ClusterConfig(model="hash", slurm=slurm), name="x", client=FakeSlurm())
    return [str(problem) for problem in caught.value.problems]


def test_folders_that_the_user_may_not_search_are_problems_and_hide_no_other(tmp_path: Path) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0)
    with nobody():
        found = problems_of(SlurmConfig(partition="q", work_dir="/", log_dir=str(shut / "logs")))
        assert found[0] == (
            f"slurm.log_dir: {shut}/logs is not writable: Permission denied -> choose a folder that you may write to"
        )
        assert "slurm.partition" in found[1]
        found = problems_of(SlurmConfig(partition="p", work_dir=str(shut / "work"), venv="/no/venv"))
    shut.chmod(0o700)
    assert found[0].startswith(f"slurm.work_dir: {shut}/work cannot be searched: Permission denied")
    assert found[1].startswith("slurm.venv: there is no /no/venv/bin/python here")
    assert len(found) == 2


def test_characters_that_sbatch_reads_otherwise_are_refused_and_spaces_are_not(tmp_path: Path) -> None:
    odd, spaced = tmp_path / "100%j", tmp_path / "it's my work"
    odd.mkdir()
    spaced.mkdir()
    [found] = problems_of(SlurmConfig(partition="p", work_dir=str(odd)))
    assert found.startswith("slurm.log_dir: sbatch cannot write logs to")
    assert "the character '%'" in found
    slurm = SlurmConfig(partition="p", work_dir=str(spaced), log_dir="my logs")
    done = submit_job(ClusterConfig(model="hash", slurm=slurm), name="x", client=FakeSlurm())
    assert done.folder.parent == spaced / "my logs"
