"""What the files of the repository may name."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALLOWED_HOSTS = {
    "arxiv.org",
    "docs.vllm.ai",
    "download.pytorch.org",
    "github.com",
    "keepachangelog.com",
    "localhost",
    "127.0.0.1",
    "semver.org",
    "www.apache.org",
}
# Written in pieces: this file is searched too.
FORBIDDEN = {
    "a path of one machine": re.compile("/".join(("", "work", ""))),
    "a package registry": re.compile(
        "|".join(
            re.escape(".".join(host))
            for host in (
                ("pypi", "org"),
                ("pythonhosted", "org"),
                ("anaconda", "org"),
                ("npmjs", "org"),
                ("debian", "org"),
            )
        )
    ),
}
# `http://{host}:{port}` in a format string names no host.
URL_HOST = re.compile(r"https?://(?:[^/\s@]*@)?([\w.-]+)")


def findings(text: str) -> list[str]:
    found = [name for name, pattern in FORBIDDEN.items() if pattern.search(text)]
    hosts = {host.rstrip(".") for host in URL_HOST.findall(text)}
    return found + [f"host {host}" for host in sorted(hosts - ALLOWED_HOSTS)]


def test_files_name_no_foreign_host_and_no_machine():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    found = {}
    for name in filter(None, listed.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            # Bytes that are not text become U+FFFD, which matches nothing.
            found[name] = findings(path.read_text(errors="replace"))
    assert "setup.py" in found
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "text",
    [
        "cd " + "/".join(("", "work", "main")),
        "https://" + "example.com/x",
        "see files.pypi" + ".org",
    ],
)
def test_control_a_foreign_name_is_found(text):
    assert findings(text)


def test_control_an_allowed_host_is_not_found():
    assert findings("https://arxiv.org/abs/1 http://{host}:{port} http://127.0.0.1:8000/v1") == []
