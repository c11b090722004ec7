"""The command as a user meets it: help, exit statuses, messages without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from cluster.cli import main
from cluster.cli.options import require_writable
from cluster.config import load_config

ROOT = Path(__file__).resolve().parents[4]
HEAVY = ("torch", "ray", "ucxx", "fastapi", "numpy", "httpx")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["demo", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = python(
        f"import sys\nfrom cluster.cli import main\nstatus = main({arguments!r})\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print('\\nLOADED', loaded, 'STATUS', status)"
    )
    assert "LOADED [] STATUS 0" in done.stdout, done.stdout + done.stderr


def test_help_takes_less_than_a_second_of_work() -> None:
    # Processor time, so that a busy machine does not fail it.
    code = (
        "import resource\nfrom cluster.cli import main\nmain(['--help'])\nu = resource.getrusage(resource.RUSAGE_SELF)"
    )
    done = python(f"{code}\nprint('\\nCPU', u.ru_utime + u.ru_stime)")
    assert float(done.stdout.rsplit("CPU", 1)[1]) < 1.0


def test_the_module_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("kvferry ")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("serve", "chat", "demo", "check", "schema", "doctor"):
        assert command in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["check", "--nonsense"],
        ["check", "-c"],
        ["serve", "--port", "many"],
        ["check", "extra"],
        ["chat", "--max-tokens", "0"],
        ["demo", "--max-tokens", "0"],
        ["doctor", "--json", "--equality"],
        ["bench", "cache", "--peer", "nobody"],
    ],
)
def test_a_wrong_command_line_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--set", "model=hash", "--json"],
        ["replay", "trace.jsonl", "--json"],
        ["replay", "trace.jsonl", "--plot"],
        ["bench", "cache", "--json"],
        ["bench", "transfer", "--json"],
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        pytest.fail("it ran")

    for function in (
        "cluster.cli.demo_command.perform",
        "cluster.replay.command.run_replay",
        "cluster.bench.cache.command.run_cache_bench",
        "cluster.bench.transfer.run_transfer_bench",
    ):
        monkeypatch.setattr(function, run)
    file = tmp_path / "file"
    file.write_text("")
    for path, words in (
        ("/no/such/folder/x.json", "there is no folder"),
        (str(file / "x.json"), "there is no folder"),
        (str(tmp_path), "is a folder"),
        (str(tmp_path / ("x" * 300)), "cannot be written"),
    ):
        assert main([*arguments, path]) == 2
        error = "".join(capsys.readouterr().err.replace("│", "").split())  # typer breaks lines in a frame
        assert words.replace(" ", "") in error and arguments[-1] in error
        assert "Traceback" not in error


def test_a_file_in_a_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = tmp_path / "present"
    present.write_text("")
    for path in (None, present, tmp_path / "new"):
        require_writable(path, "--json")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # what root never meets
    for path in (present, tmp_path / "new"):
        with pytest.raises(typer.BadParameter, match="name another"):
            require_writable(path, "--json")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["check", "serve", "demo", "doctor"])
def test_a_wrong_configuration_is_status_2_and_names_the_remedy(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("kv_cache_config: {block_reuse_config: {policy: per_conversatoin, max_num_turns: 0}}\n")
    assert main([command, "-c", str(path)]) == 2
    error = capsys.readouterr().err
    assert "2 errors" in error
    assert "did you mean per_conversation?" in error
    assert f"{path}:1" in error
    assert "Traceback" not in error


def test_a_flag_of_serve_is_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert "server.port" in capsys.readouterr().err


def test_check_prints_a_tree_that_is_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--set", "model=hash", "--set", "server.port=4321"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert yaml.safe_load(captured.out)["server"]["port"] == 4321
    path = tmp_path / "merged.yaml"
    path.write_text(captured.out)
    assert load_config(path).model == "hash"


def test_check_reads_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_MODEL", "hash")
    monkeypatch.setenv("KVFERRY_SERVER__PORT", "4322")
    assert main(["check"]) == 0
    assert "port: 4322" in capsys.readouterr().out


def test_check_warns_on_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    turns = "kv_cache_config.block_reuse_config.max_num_turns=3"
    assert main(["check", "--set", "model=hash", "--set", turns]) == 0
    assert capsys.readouterr().err.count("has no effect with policy all_reusable") == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model=hash", "kv_cache_config.max_tokens=64"], "pool of 64"),
        (["model=hash", "context_servers.tensor_parallel_size=7"], "tensor_parallel_size"),
        (["model=/no/such/model.gguf"], "model"),
        (["model=smolm"], "model"),
    ],
)
def test_check_looks_at_both_roles_and_the_model(
    settings: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_an_unreadable_model_is_not_looked_at_when_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--skip-model", "--set", "model=/no/such/model.gguf"]) == 0
    assert "model: /no/such/model.gguf" in capsys.readouterr().out


def test_schema_is_json_schema_of_the_whole_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert {"model", "engine", "kv_cache_config", "server"} <= set(schema["properties"])


def test_chat_without_a_server_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert "kvferry serve" in error
    assert "Traceback" not in error
