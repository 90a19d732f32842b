"""Files are replaced: a full disk, an error or a kill leaves what was there, and nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jpmhc.files import replacing, require_writable, write_csv, write_file
from tests.full_disk import full_disk


def test_a_file_is_written_with_its_folder(tmp_path):
    path = write_file(tmp_path / "new" / "folder" / "a.txt", "ä\n")
    assert path.read_bytes() == "ä\n".encode()
    assert write_csv(path, ("x", "y"), [(1, 0.5), ("a,b", None)]).read_bytes() == b'x,y\r\n1,0.5\r\n"a,b",\r\n'
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("size", [1001, 100_000, 10_000_000])
def test_a_full_disk_leaves_the_former_content(tmp_path, size):
    path = write_file(tmp_path / "a", "former")
    for name in ("a", "b"):
        with full_disk(1000), pytest.raises(OSError, match=rf"File too large: '{tmp_path / name}'$") as refused:
            write_file(tmp_path / name, bytes(size))
        assert refused.value.filename == str(tmp_path / name)
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("count", [1000, 1_000_000])
def test_a_full_disk_under_torch_save_is_told_as_such(tmp_path, count):
    path = write_file(tmp_path / "a.pt", "former")
    with full_disk(1000), pytest.raises(OSError, match="File too large"), replacing(path) as file:
        torch.save({"tensor": torch.zeros(count)}, file)
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_any_other_error_leaves_the_former_content_as_well(tmp_path):
    path = write_file(tmp_path / "a", "former")
    for error in (RuntimeError("not of the disk"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, replacing(path):
            raise error
        assert raised.value is error
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_process_leaves_the_former_content(tmp_path):
    path = write_file(tmp_path / "a", "former")
    script = (
        "import os, pathlib, signal\nfrom jpmhc.files import replacing\n"
        f"with replacing(pathlib.Path({str(path)!r})) as file:\n"
        "    file.write(b'half')\n    file.flush()\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode < 0
    assert path.read_text() == "former"


def test_permissions_and_links_stay(tmp_path):
    path = write_file(tmp_path / "a", "former")
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    write_file(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    mask = os.umask(0o027)
    try:
        assert write_file(tmp_path / "b", "").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(mask)


def test_a_long_name_and_a_device_can_be_written_to(tmp_path):
    assert write_file(tmp_path / ("ä" * 120), "x").read_text() == "x"
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_file(Path("/dev/full"), "x")
    write_file(Path("/dev/null"), "x")
    assert Path("/dev/null").is_char_device()


def test_what_cannot_be_written_to_is_known_before(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "result", tmp_path, Path("/proc/result")):
        with pytest.raises(ValueError, match=re.escape(f"cannot write to {path} (") + r".*\): name another --out$"):
            require_writable(path)
        with pytest.raises(OSError, match=re.escape(f"'{path}'")):
            write_file(path, "x")
    require_writable(tmp_path / "new" / "result")
    require_writable(Path("/dev/full"))
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
