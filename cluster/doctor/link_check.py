"""Looks at how KV really travels: a trial transfer between two processes, and the live links of a running server.

Called by `examine`. The trial runs in processes of its own, so that no fabric is loaded here; a failure is a finding.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, TextIO

from cluster.doctor.finding import Finding, Verdict
from transceiver import CacheTransceiverConfig, TransceiverBackend

__all__ = ["check_link", "check_live_links", "live_links_in"]

_PROBE = ("-m", "cluster.doctor.link_probe")
_TIMEOUT_S = 60.0
_LINE = re.compile(r"^kvferry_link_(bytes|transfers)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def check_link(config: CacheTransceiverConfig, *, environment: dict[str, str] | None = None) -> Iterator[Finding]:
    """Move 8 MiB from one process to another with this configuration, and say what moved them. Takes seconds."""
    if config.backend is TransceiverBackend.INPROC:
        yield Finding("link", Verdict.OK, "backend inproc: workers share one process, nothing travels")
        return
    subject = f"link, {config.backend.value}"
    try:
        answer = _trial(config.model_copy(update={"perf_csv": None}).model_dump_json(), environment)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield Finding(subject, Verdict.FAIL, f"no transfer between two processes: {error}", "see the rows above")
        return
    yield _judge(subject, config, answer)


def _judge(subject: str, config: CacheTransceiverConfig, answer: dict[str, Any]) -> Finding:
    if answer["status"] != "done" or not answer["equal"]:
        reason = answer["reason"] or "the bytes differ"
        return Finding(subject, Verdict.FAIL, f"a transfer between two processes failed: {reason}", "see the log")
    mib, seconds = answer["bytes"] / 2**20, answer["seconds"]
    text = f"{answer['transport']} ({answer['detail']}): {mib:.0f} MiB in {seconds * 1e3:.0f} ms, first transfer"
    if "refuses cma" in answer["detail"]:
        remedy = "let workers read each other (same user; ptrace_scope 0; in a container SYS_PTRACE), or accept TCP"
        return Finding(subject, Verdict.WARN, text, remedy)
    return Finding(subject, Verdict.OK, text)


def _trial(config_json: str, environment: dict[str, str] | None) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as said:  # a pipe that nobody reads would stop the holder
        holder = subprocess.Popen(
            [*_command(), "hold", config_json], stdout=subprocess.PIPE, stderr=said, text=True, env=environment
        )
        try:
            return _pull_from(holder, said, config_json, environment)
        finally:
            if holder.poll() is None:
                holder.kill()
            holder.communicate()


def _command() -> list[str]:
    return [sys.executable, *_PROBE]


def _pull_from(
    holder: subprocess.Popen[str], said: TextIO, config_json: str, environment: dict[str, str] | None
) -> dict[str, Any]:
    """Start the other end and let it pull. Raises ValueError and SubprocessError, also for ends that say nothing."""
    assert holder.stdout is not None
    deadline = threading.Timer(_TIMEOUT_S, holder.kill)  # which ends `readline`
    deadline.start()
    ticket = holder.stdout.readline()
    deadline.cancel()
    if not ticket:
        code = holder.wait(_TIMEOUT_S)
        if code == -signal.SIGKILL:
            raise ValueError(f"the holding end offered nothing within {_TIMEOUT_S:g} s")
        said.seek(0)
        raise ValueError(_last_line(said.read()))
    done = subprocess.run(
        [*_command(), "pull", config_json, ticket], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        env=environment,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(_last_line(done.stderr))
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    holder.communicate(timeout=_TIMEOUT_S)
    return answer


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"


def live_links_in(metrics: str) -> list[tuple[dict[str, str], float, float]]:
    """(labels, bytes, transfers) of every link in a server's metrics."""
    found: dict[str, tuple[dict[str, str], dict[str, float]]] = {}
    for name, labels, value in _LINE.findall(metrics):
        entry = found.setdefault(labels, ({k: v.replace('\\"', '"') for k, v in _LABEL.findall(labels)}, {}))
        entry[1][name] = float(value)
    return [(labels, values.get("bytes", 0.0), values.get("transfers", 0.0)) for labels, values in found.values()]


def check_live_links(host: str, port: int) -> Iterator[Finding]:
    """The links of the server that listens there, if one does; nothing otherwise."""
    where = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    url = f"http://[{where}]:{port}/metrics" if ":" in where else f"http://{where}:{port}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            text = response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        yield Finding("live links", Verdict.WARN, f"{url} answers {error.code}", "ask where its metrics can be read")
        return
    except (OSError, ValueError):
        return  # no server here: the row of the port says so
    links = live_links_in(text)
    if "kvferry_worker_up" not in text:
        return  # somebody else's server
    if not links:
        yield Finding("live links", Verdict.OK, "the server here has moved no KV yet")
    for labels, nbytes, transfers in links:
        refused = "refuses cma" in labels.get("detail", "")
        yield Finding(
            f"link {labels.get('worker')} <- {labels.get('peer')}", Verdict.WARN if refused else Verdict.OK,
            f"{labels.get('transport')} ({labels.get('detail')}): {nbytes / 2**20:.1f} MiB in {transfers:.0f} pulls",
            "see the row of the trial link" if refused else "",
        )  # fmt: skip
