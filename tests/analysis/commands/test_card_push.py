"""Uploads to a server on the loopback address that answers as the hub does."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class _Hub(BaseHTTPRequestHandler):
    """Takes every file as part of the commit."""

    def do_GET(self) -> None:
        self._answer({"id": "me/tiny", "sha": "0" * 40, "siblings": [], "name": "me", "type": "user"})

    def do_POST(self) -> None:
        body = self._body()
        at, seen = self.path.split("?")[0], self.server.seen  # type: ignore[attr-defined]
        seen.append((at, self.headers.get("authorization"), body))
        url = f"http://127.0.0.1:{self.server.server_address[1]}/me/tiny"
        if at == "/api/repos/create":
            refused = json.loads(body)["name"] == "refused"
            return self._answer(
                {"error": "You may not"} if refused else {"url": url}, 403 if refused else 200
            )
        if "/preupload/" in at:
            kinds = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self._answer({"files": kinds})
        if "/commit/" in at:
            return self._answer(
                {"commitUrl": f"{url}/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}
            )
        return self._answer({"errors": [], "warnings": []})

    def _body(self) -> bytes:
        if "content-length" in self.headers:
            return self.rfile.read(int(self.headers["content-length"]))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _answer(self, data: object, status: int = 200) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def _hub() -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.seen  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _card(
    folder: Path, name: str, endpoint: str, home: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `loopq card --push` in a process that knows only this hub."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **more,
    }
    words = [sys.executable, "-m", "loopq", "card", str(folder), "--push", name]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_folder_is_uploaded_with_its_card(quantized, tmp_path):
    folder = tmp_path / "q"
    shutil.copytree(quantized, folder)
    (folder / ".secret").write_text("no")
    with _hub() as (endpoint, seen):
        done = _card(folder, "tiny", endpoint, tmp_path / "home", HF_TOKEN="hf_x")
    assert done.returncode == 0, done.stderr
    assert f"uploaded: {endpoint}/me/tiny" in done.stdout
    assert seen[0][0] == "/api/repos/create"
    assert json.loads(seen[0][2])["name"] == "tiny"
    assert {token for _, token, _ in seen} == {"Bearer hf_x"}
    (commit,) = [body for at, _, body in seen if "/commit/" in at]
    lines = [json.loads(line)["value"] for line in commit.splitlines()]
    files = {v["path"]: base64.b64decode(v["content"]) for v in lines if "path" in v}
    assert set(files) == {p.name for p in folder.iterdir() if not p.name.startswith(".")}
    assert files["README.md"].startswith(b"---\n")
    assert all(data == (folder / name).read_bytes() for name, data in files.items())


@pytest.mark.parametrize(
    ("name", "more", "match"),
    [
        ("me/tiny", {}, "no token of the hub: run `hf auth login`"),
        ("a/b/c", {"HF_TOKEN": "hf_x"}, "name a repository of the hub: OWNER/NAME"),
        ("refused", {"HF_TOKEN": "hf_x"}, "--push refused: "),
        ("me/tiny", {"HF_TOKEN": "hf_x", "HF_ENDPOINT": "http://127.0.0.1:9"}, "run the command again"),
        ("me/tiny", {"HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "1"}, "--push me/tiny: "),
    ],
)
def test_an_upload_that_fails_is_one_line(quantized, tmp_path, name, more, match):
    shutil.copytree(quantized, tmp_path / "q")
    with _hub() as (endpoint, seen):
        done = _card(tmp_path / "q", name, endpoint, tmp_path / "home", **more)
        assert not [at for at, *_ in seen if "/commit/" in at]
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert match in done.stderr
    early = re.search("no token|OWNER/NAME", match) is not None
    assert (tmp_path / "q" / "README.md").exists() != early


def test_a_missing_client_is_named_before_any_work(quantized, tmp_path):
    shutil.copytree(quantized, tmp_path / "q")
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "huggingface_hub.py").write_text(
        "raise ModuleNotFoundError('No module named huggingface_hub', name='huggingface_hub')\n"
    )
    path = os.pathsep.join([str(tmp_path / "without"), os.environ.get("PYTHONPATH", "")])
    done = _card(tmp_path / "q", "me/tiny", "http://127.0.0.1:9", tmp_path / "home", PYTHONPATH=path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "pip install 'loopq[hf]'" in done.stderr
    assert not (tmp_path / "q" / "README.md").exists()
