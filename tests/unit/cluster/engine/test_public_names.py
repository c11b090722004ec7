"""What importing the engine costs, and what it exports."""

from __future__ import annotations

import subprocess
import sys

import cluster.engine

HEAVY = ("torch", "gguf", "safetensors", "tokenizers", "jinja2", "transformers", "ray")


def _run(code: str, allowed: tuple[str, ...] = ()) -> None:
    unwanted = [name for name in HEAVY if name not in allowed]
    check = f"\nimport sys\nbad = [m for m in {unwanted} if m in sys.modules]\nassert not bad, bad"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_names_are_sorted_and_exist() -> None:
    assert cluster.engine.__all__ == sorted(cluster.engine.__all__)
    for name in cluster.engine.__all__:
        assert hasattr(cluster.engine, name)


def test_importing_the_engine_is_cheap() -> None:
    _run("import cluster.engine")


def test_the_hash_model_needs_no_heavy_library() -> None:
    _run(
        "import numpy as np\n"
        "from cluster.engine import SequenceStep, StepPlan, describe_model, load_runner, load_tokenizer, make_storage\n"
        "from cluster.request import SamplingParams\n"
        "runner = load_runner('hash', tokens_per_block=8)\n"
        "runner.bind(make_storage(runner, [4]))\n"
        "ids = np.array(load_tokenizer('hash').encode('abc'), dtype=np.int32)\n"
        "step = SequenceStep(ids, 0, (np.arange(4, dtype=np.int32),), SamplingParams())\n"
        "assert runner.execute(StepPlan([step]))[0] is not None\n"
        "describe_model('hash', 8)\n"
    )


def test_the_real_tokenizer_and_description_need_no_torch() -> None:
    _run(
        "from cluster.engine import describe_model, load_tokenizer\n"
        "load_tokenizer('smollm2-135m')\n"
        "describe_model('smollm2-135m', 32, device='cpu')\n",
        allowed=("tokenizers", "jinja2"),
    )
