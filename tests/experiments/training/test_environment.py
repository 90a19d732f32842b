"""What the log says of the machine and the source."""

import subprocess

from jpmhc.experiments.training.environment import find_commit


def test_the_commit_is_that_of_the_source_and_says_when_it_was_changed(tmp_path):
    def git(*words):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=b", *words], cwd=tmp_path, capture_output=True
        )
        return done.stdout.decode().strip()

    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    assert find_commit(tmp_path / "package") is None
    git("init")
    assert find_commit(tmp_path / "package") is None  # inside a repository that does not know it
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert find_commit(tmp_path / "package") == commit
    (tmp_path / "package" / "__init__.py").write_text("changed = 1")
    assert find_commit(tmp_path / "package") == f"{commit}+"
