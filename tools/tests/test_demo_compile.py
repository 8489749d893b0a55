"""`phalanx demo --compile`: the model as one compiled graph computes what one process does."""

import importlib.util
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")

SMALL = [
    "--layers=2",
    "--hidden=32",
    "--batch=2",
    "--sequence=32",
    "--text-bytes=65536",
    "--steps=4",
    "--checked-steps=3",
]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("phalanx.inductor_plugin") is None, reason="phalanx-inductor-plugin is not installed"
)
def test_compiled_steps_agree_with_one_process_and_the_plug_in_says_what_became_of_each_collective(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-m", "phalanx.core._cli", "demo", *SMALL, "--no-gloo", "--compile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "compiled by the backend 'phalanx'" in done.stdout
    checked = re.findall(r"step (\d+)  loss ([\d.]+), one process ([\d.]+); all \d+ gradients agree", done.stdout)
    assert [int(step) for step, _, _ in checked] == [1, 2, 3]
    for _, loss, of_one_process in checked:
        assert float(loss) == pytest.approx(float(of_one_process), rel=1e-5)


def test_without_the_plug_in_the_error_names_the_package(monkeypatch, capsys):
    from phalanx.tools.demo import options

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        options.parse(["--compile"])
    assert "--compile needs phalanx-inductor-plugin, which is not installed" in capsys.readouterr().err
    assert options.parse(["--compile", "inductor"]).compile == "inductor"
