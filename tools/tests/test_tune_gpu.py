"""phalanx tune --device cuda."""

import os

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
fake_torch_cuda = pytest.importorskip("fake_torch_cuda")

from phalanx.core import GpuTuning, _cli  # noqa: E402
from phalanx.core.tuning import rows_of_gpus  # noqa: E402
from phalanx.tools.tune import _main  # noqa: E402

QUICK = ["--device", "cuda", "--ranks", "2", "--seconds", "0.1", "--largest", "64k"]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The path of the table that new groups read. There is none yet."""
    path = tmp_path / "deep" / "tuning"
    monkeypatch.setenv("PHALANX_TUNING", str(path))
    return path


@pytest.fixture
def gpus(monkeypatch):
    """GPUs for the processes that the test starts: those of the host, or two of the driver without one."""
    fake_torch_cuda.needs_cuda()
    if not torch.cuda.is_available():
        driver, _ = fake_torch_cuda.building.libraries()
        paths = [str(driver.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(paths))
        monkeypatch.setenv("PHALANX_CUDA_KERNELS", str(driver))


def test_tune_writes_a_table_that_new_groups_on_these_gpus_read(table, gpus, capsys):
    assert _cli.main(["tune", *QUICK]) == 0
    text = capsys.readouterr().out
    assert f"table: {table} (does not exist)" in text
    assert "2 ranks on " in text
    for name in ("line_bytes", "two_shot_bytes", "copy_bytes", "thread_bytes"):
        assert text.count(f"  {name} ") == 1
    ((key, row),) = rows_of_gpus(table.read_text()).items()
    assert key.ranks == 2
    assert set(row) == set(vars(GpuTuning()))
    table.write_text(table.read_text().replace(f"line_bytes={row['line_bytes']}", "line_bytes=192"))
    assert _cli.main(["tune", "--device", "cuda", "--show", "--ranks", "2"]) == 0
    assert "192  built-in 32k" in capsys.readouterr().out


def test_tune_measures_ranks_that_share_a_gpu_and_may_write_nothing(table, gpus, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = [word for word in QUICK if word not in ("--ranks", "2")]
    assert _cli.main(["tune", *words, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "2 ranks on 1 GPU, shared (" in text
    assert "multicast_bytes" not in text  # each rank would need a GPU of its own
    assert "nothing was written" in text
    assert not table.exists()


def test_group_sizes_fit_the_gpus():
    assert [_main.default_ranks_of_gpus(gpus) for gpus in (1, 2, 3, 8)] == [[2], [2], [2, 3], [2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            {"missing": "libcuda.so.1: no such file"},
            "there is no CUDA driver on this host (libcuda.so.1: no such file)",
        ),
        ({"trouble": "the driver ended its process with status -6"}, "cannot be used: the driver ended its process"),
        ({"status": 999, "reason": "CUDA_ERROR_UNKNOWN"}, "cuInit says 999 (CUDA_ERROR_UNKNOWN)"),
        ({"status": 0, "devices": []}, "CUDA_VISIBLE_DEVICES may hide them"),
    ],
)
def test_tune_says_why_there_is_no_gpu(table, found, text, monkeypatch, capsys):
    monkeypatch.setattr(_main, "ask_cuda_driver", lambda: found)
    assert _cli.main(["tune", "--device", "cuda"]) == 1
    assert text in capsys.readouterr().err
    assert not table.exists()


def test_tune_says_what_a_rank_could_not_do(table, gpus, monkeypatch, capsys):
    monkeypatch.setenv("PHALANX_CUDA_KERNELS", "/nowhere/kernels")
    assert _cli.main(["tune", *QUICK]) == 1
    assert "/nowhere/kernels" in capsys.readouterr().err
    assert not table.exists()
