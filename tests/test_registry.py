"""The registry: what is pulled is what was pushed, to a folder, an object store in memory and a real S3 server."""

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from dflash.drafter.export import load_drafter, save_drafter
from dflash.registry import FILES, FolderStore, _of_hub, pull, push, store_of
from tests.drafter.small import make_drafter
from tests.s3 import SECRET, ask, new_bucket


@pytest.fixture(autouse=True)
def _own_root(home: Path) -> None:
    pass


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return made(tmp_path / "drafter")


def made(folder: Path, *, seed: int = 0) -> Path:
    folder.mkdir()
    save_drafter(folder, make_drafter(seed=seed))
    (folder / "README.md").write_text(f"A drafter of seed {seed}.\n")
    (folder / "plots").mkdir()
    (folder / "plots" / "loss.svg").write_text("<svg/>")
    (folder / ".hidden").write_text("not sent")
    return folder


@pytest.fixture(params=["folder", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "registry")
    if request.param == "memory":
        pytest.importorskip("obstore", reason="object stores need the extra cloud")
        return f"memory://{uuid.uuid4().hex}/some/where"
    return new_bucket(request.getfixturevalue("s3"))


def error(*words: str) -> str:
    """Of `dflash` with these words, in a process of its own; nothing of it is secret."""
    done = subprocess.run([sys.executable, "-m", "flows.cli", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert SECRET not in done.stdout + done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    return line


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sent_of(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(folder).items() if name != ".hidden"}


def test_what_is_pulled_is_what_was_pushed_and_aliases_lead_to_it(place: str, drafter: Path, tmp_path: Path) -> None:
    first = push(drafter, place, champion=True)
    assert first.aliases == ("latest", "champion")
    second = push(made(tmp_path / "newer", seed=1), place, champion=False)
    assert second.aliases == ("latest",)
    assert pull(place, tmp_path / "a", name="champion") == first.drafter
    assert pull(place, tmp_path / "b", name="latest") == second.drafter != first.drafter
    assert pull(place, tmp_path / "c", name=first.drafter) == first.drafter
    assert content(tmp_path / "a") == content(tmp_path / "c") == sent_of(drafter)
    weights = load_drafter(tmp_path / "b", dtype=torch.float32).fc.weight
    assert torch.equal(weights, make_drafter(seed=1).fc.weight)

    again = push(drafter, place, champion=True)
    assert (again.drafter, again.sent) == (first.drafter, 0), "what is there is not sent again"
    assert pull(place, tmp_path / "a", name="latest") == first.drafter, "and what was pulled is not pulled again"
    assert not list(tmp_path.glob(".*.pull"))


def test_a_name_that_is_not_there_is_said_with_those_that_are(place: str, drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no latest; it has no drafter yet: dflash push"):
        pull(place, tmp_path / "out", name="latest")
    push(drafter, place, champion=False)
    with pytest.raises(ValueError, match="has no champion; it has latest"):
        pull(place, tmp_path / "out", name="champion")
    with pytest.raises(ValueError, match=r"'best' is unknown; give latest, champion or a drafter's own"):
        pull(place, tmp_path / "out", name="best")
    with pytest.raises(ValueError, match="drafter-000000000000 was never pushed whole"):
        pull(place, tmp_path / "out", name="drafter-000000000000")
    assert not (tmp_path / "out").exists()


def test_another_content_than_was_pushed_is_never_published(place: str, drafter: Path, tmp_path: Path) -> None:
    name = push(drafter, place, champion=False).drafter
    store, path = store_of(place), f"drafters/{name}/model.safetensors"
    weights = (drafter / "model.safetensors").read_bytes()
    store.put(path, weights[:-1] + b"\0")
    with pytest.raises(ValueError, match=rf"{path} differs from its checksum \({len(weights)} of {len(weights)} bytes"):
        pull(place, tmp_path / "out", name="latest")
    assert push(drafter, place, champion=False).sent == len(weights), "a push mends it"
    assert pull(place, tmp_path / "mended", name="latest") == name
    store.put(path, weights[:-7])
    with pytest.raises(ValueError, match=rf"{path} differs from its checksum \({len(weights) - 7} of"):
        pull(place, tmp_path / "out", name="latest")
    assert not (tmp_path / "out").exists()
    assert push(drafter, place, champion=False).sent == len(weights), "a push mends it"
    assert pull(place, tmp_path / "out", name="latest") == name

    listing = json.loads(store.read(f"drafters/{name}/{FILES}") or b"")
    listing["files"]["../outside"] = listing["files"]["README.md"]
    store.put(f"drafters/{name}/{FILES}", json.dumps(listing).encode())
    with pytest.raises(ValueError, match=r"names '../outside', which is no file of a drafter"):
        pull(place, tmp_path / "other", name="latest")
    del listing["files"]["../outside"], listing["files"]["README.md"]
    store.put(f"drafters/{name}/{FILES}", json.dumps(listing).encode())
    with pytest.raises(ValueError, match=f"is of drafter-.*, not of {name}"):
        pull(place, tmp_path / "other", name="latest")
    for named in ({}, {"drafter": "../../outside", "set": ""}, {"drafter": f"{name}\n", "set": ""}):
        store.put("latest.json", json.dumps(named).encode())
        with pytest.raises(ValueError, match=r"the registry is damaged: .*latest.json has .*; push again"):
            pull(place, tmp_path / "other", name="latest")


def test_an_interrupted_pull_goes_on_where_it_was(place: str, drafter: Path, tmp_path: Path) -> None:
    name = push(drafter, place, champion=False).drafter
    weights = (drafter / "model.safetensors").read_bytes()
    aside = tmp_path / ".out.pull"
    aside.mkdir()
    (aside / "model.safetensors.part").write_bytes(weights[:1000])
    (aside / "config.json").write_bytes((drafter / "config.json").read_bytes())
    (aside / "of-another-one.txt").write_text("left")
    assert not (tmp_path / "out").exists()
    assert pull(place, tmp_path / "out", name=name) == name
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    assert not (tmp_path / "out" / "of-another-one.txt").exists()

    (aside / "plots").mkdir(parents=True)
    (aside / "model.safetensors.part").write_bytes(b"\1" * 1000)  # as after damage: begun anew
    shutil.rmtree(tmp_path / "out")
    assert pull(place, tmp_path / "out", name=name) == name
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights


def test_only_the_missing_bytes_are_asked_for(drafter: Path, tmp_path: Path) -> None:
    name = push(drafter, str(tmp_path / "registry"), champion=False).drafter
    stored = tmp_path / "registry" / "drafters" / name / "model.safetensors"
    assert (
        b"".join(FolderStore(tmp_path / "registry").stream(f"drafters/{name}/model.safetensors", 5))
        == (stored.read_bytes()[5:])
    )
    aside = tmp_path / ".out.pull"
    aside.mkdir()
    (aside / "model.safetensors.part").write_bytes(stored.read_bytes()[:1000])
    damaged = bytearray(stored.read_bytes())
    damaged[10] ^= 1  # in what is here already
    stored.write_bytes(damaged)
    assert pull(str(tmp_path / "registry"), tmp_path / "out", name="latest") == name


KILLED = """
import os, signal, sys
from pathlib import Path
from dflash import registry
put, count = registry.FolderStore.put, 0
def dying(self, name, content):
    global count
    count += 1
    if count == 3:
        with (self.folder / name).with_name(".model.safetensors.part").open("wb") as file:
            file.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, name, content)
registry.FolderStore.put = dying
registry.push(Path(sys.argv[1]), sys.argv[2], champion=True)
"""


def test_a_push_that_was_killed_half_way_leaves_the_aliases_and_is_continued(drafter: Path, tmp_path: Path) -> None:
    place, newer = str(tmp_path / "registry"), made(tmp_path / "newer", seed=1)
    first = push(drafter, place, champion=True).drafter
    done = subprocess.run([sys.executable, "-c", KILLED, str(newer), place], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert pull(place, tmp_path / "a", name="latest") == pull(place, tmp_path / "a", name="champion") == first
    listed = sum(path.stat().st_size for path in newer.rglob("*") if path.is_file() and path.name != ".hidden")
    second = push(newer, place, champion=True)
    assert 0 < second.sent < listed, "what had arrived is not sent again"
    assert pull(place, tmp_path / "b", name="champion") == second.drafter


def test_what_holds_something_else_is_left_alone(drafter: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes holds mine.txt, so it is no registry of drafters; give another"):
        push(drafter, str(tmp_path / "notes"), champion=False)
    push(drafter, str(tmp_path / "registry"), champion=False)
    with pytest.raises(ValueError, match="notes holds something else than drafter-"):
        pull(str(tmp_path / "registry"), tmp_path / "notes", name="latest")
    assert content(tmp_path / "notes") == {"mine.txt": b"mine"}
    with pytest.raises(ValueError, match="registry holds no config.json and .safetensors, so it is no drafter"):
        push(tmp_path / "registry", str(tmp_path / "other"), champion=False)
    sums = drafter / "SHA256SUMS"
    sums.write_text(f"{'0' * 64}  config.json\n")
    with pytest.raises(ValueError, match=r"config.json differs from its checksum in SHA256SUMS"):
        push(drafter, str(tmp_path / "other"), champion=False)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("manifest", ["manifest.json", "manifest.json.damaged"])
def test_an_artifact_is_exported_before_it_is_pushed(manifest: str, drafter: Path, tmp_path: Path) -> None:
    (drafter / manifest).write_text("{}")
    for target in (str(tmp_path / "registry"), "hub:someone/drafter"):
        with pytest.raises(ValueError, match="drafter is an artifact; export it first: dflash export "):
            push(drafter, target, champion=False)
    assert not (tmp_path / "registry").exists()


def test_no_right_to_write_is_one_line_without_secrets(s3: str, drafter: Path, tmp_path: Path) -> None:
    bucket = new_bucket(s3)
    ask(s3, "moto-api/reset-auth", method="POST", data=b"0")  # from now on keys must be known
    try:
        said = error("push", str(drafter), bucket)
    finally:
        ask(s3, "moto-api/reset-auth", method="POST", data=b"1000000")
    assert bucket in said
    assert "check the place and your rights there" in said
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="check the place and your rights there"):
        push(drafter, str(tmp_path / "file" / "registry"), champion=False)
    with pytest.raises(ValueError, match="the address holds a user or password, or options") as caught:
        push(drafter, f"s3://key:{SECRET}@bucket/path", champion=False)
    assert SECRET not in str(caught.value)


def test_the_hub_is_refused_offline_and_without_a_token_in_one_line(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"hub:someone/drafter: HF_TOKEN is not set"):
        push(drafter, "hub:someone/drafter", champion=False)
    with pytest.raises(ValueError, match=r"hub:drafter: give hub:OWNER/NAME"):
        push(drafter, "hub:drafter", champion=False)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    for call in (
        lambda: push(drafter, "hub:someone/drafter", champion=True),
        lambda: pull("hub:someone/drafter", tmp_path / "out", name="champion"),
    ):
        with pytest.raises(ValueError, match=r"hub:someone/drafter: .*; check the name, the network and") as caught:
            call()
        assert SECRET not in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "said",
    [
        f"Illegal header value b'Bearer {SECRET}'",
        f"{'x' * 190} {SECRET}",  # across the cut
        f"token {SECRET} and {SECRET}",
    ],
)
def test_a_token_is_taken_out_of_what_the_hub_says(said: str) -> None:
    shown = str(_of_hub("someone/drafter", RuntimeError(said), SECRET))
    assert "…" in shown
    assert SECRET[:5] not in shown


def test_a_token_with_a_line_end_within_is_not_shown_as_it_is_quoted() -> None:
    token = f"first-half\n{SECRET}"
    shown = str(_of_hub("someone/drafter", RuntimeError(f"Illegal header value {f'Bearer {token}'.encode()!r}"), token))
    assert "Illegal header value b'Bearer …'" in shown
    assert SECRET not in shown


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lfs_of(content: bytes) -> dict[str, object]:
    return {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 100}


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a registry needs, for the real client; one repository, in memory."""

    commits: dict[str, dict[str, bytes]]
    tags: dict[str, str]
    champions: list[str]  # the only commits that may become it; none: all
    asked: list[str]
    large: set[str]  # files that it says it keeps as large ones
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, body: object = None, *, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def answer(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0].removeprefix("/api/models").removeprefix("/someone/drafter").strip("/")
        action, _, rest = path.partition("/")
        self.asked.append(f"{self.command} {path}")
        if self.headers["Authorization"] != f"Bearer {SECRET}":
            return self.reply({"error": "who are you"}, status=401)
        commits, tags, head = self.commits, self.tags, list(self.commits)[-1]
        if path in ("api/repos/create", "api/validate-yaml"):
            return self.reply({"url": "https://huggingface.co/someone/drafter", "errors": [], "warnings": []})
        if action == "preupload":
            names = [file["path"] for file in json.loads(data)["files"]]
            oids = {name: git_oid(content) for name, content in commits[head].items()}
            return self.reply(
                {
                    "files": [
                        {"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": oids.get(name)}
                        for name in names
                    ]
                }
            )
        if action == "commit":
            files = dict(commits[head])
            for line in data.decode().splitlines():
                part = json.loads(line)
                if part["key"] == "file":
                    files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
                elif part["key"] == "deletedFile":
                    del files[part["value"]["path"]]
            head = hashlib.sha1(data + head.encode()).hexdigest()
            commits[head] = files
            return self.reply({"commitUrl": f"https://huggingface.co/someone/drafter/commit/{head}", "commitOid": head})
        if action == "refs":
            listed = [
                {"name": name, "ref": f"refs/tags/{name}", "targetCommit": commit} for name, commit in tags.items()
            ]
            return self.reply({"branches": [], "converts": [], "tags": listed})
        if action == "tag" and self.command == "DELETE":
            del tags[rest]
            return self.reply({})
        if action == "tag":
            name = json.loads(data)["tag"]
            if name in tags:
                return self.reply({"error": "it is there"}, status=409)
            if name == "champion" and self.champions and rest not in self.champions:
                return self.reply({"error": "not now"}, status=403)
            tags[name] = rest
            return self.reply({})
        revision, _, file = rest.partition("/")
        commit = head if revision in ("", "main") else tags.get(revision, revision)
        if commit not in commits:
            return self.reply({"error": "no such revision"}, status=404, X_Error_Code="RevisionNotFound")
        files = commits[commit]
        etags = {name: git_oid(content) for name, content in files.items()}
        if action == "revision":
            return self.reply({"id": "someone/drafter", "sha": commit, "siblings": []})
        if action == "tree":
            return self.reply(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": etags[name]}
                    | ({"lfs": lfs_of(content)} if name in self.large else {})
                    for name, content in files.items()
                ]
            )
        if action == "resolve" and file in files:
            return self.reply(files[file], ETag=f'"{etags[file]}"', X_Repo_Commit=commit)
        return self.reply({"error": f"unknown: {self.command} {self.path}"}, status=404)

    do_GET = do_HEAD = do_POST = do_DELETE = answer  # noqa: N815


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    from huggingface_hub import constants

    state = {"commits": {"0" * 40: {".gitattributes": b""}}, "tags": {}, "champions": [], "asked": [], "large": set()}
    handler = type("OneHub", (Hub,), state)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", f"{SECRET}\n")  # as a file has it
    yield handler
    server.shutdown()
    server.server_close()


def test_on_the_hub_what_is_pulled_is_what_was_pushed(hub: type[Hub], drafter: Path, tmp_path: Path) -> None:
    place, newer = "hub:someone/drafter", made(tmp_path / "newer", seed=1)
    (newer / "plots" / "loss.svg").rename(newer / "plots" / "rate.svg")
    first = push(drafter, place, champion=True).drafter
    second = push(newer, place, champion=False).drafter
    assert pull(place, tmp_path / "a", name="champion") == first
    assert pull(place, tmp_path / "b", name="latest") == second != first
    assert pull(place, tmp_path / "c", name=first) == first
    assert content(tmp_path / "a") == content(tmp_path / "c") == sent_of(drafter)
    assert content(tmp_path / "b") == sent_of(newer)

    hub.tags[second] = hub.tags[first]
    with pytest.raises(ValueError, match=f"hub:someone/drafter has {first} under the tag {second}; push {second} ag"):
        pull(place, tmp_path / "d", name=second)
    push(newer, place, champion=False)
    assert pull(place, tmp_path / "d", name=second) == second
    with pytest.raises(ValueError, match="'main' is unknown; give latest, champion or"):
        pull(place, tmp_path / "e", name="main")
    with pytest.raises(ValueError, match="RevisionNotFoundError"):
        pull(place, tmp_path / "e", name="drafter-000000000000")
    assert not (tmp_path / "e").exists()


def test_a_push_to_the_hub_says_how_many_bytes_were_not_there(hub: type[Hub], drafter: Path) -> None:
    place = "hub:someone/drafter"
    whole = sum(map(len, sent_of(drafter).values()))
    assert push(drafter, place, champion=False).sent == whole
    assert push(drafter, place, champion=True).sent == 0, "all of it is there"
    (drafter / "README.md").write_text("Another card.\n")
    assert push(drafter, place, champion=False).sent == len("Another card.\n")
    hub.large = {"model.safetensors"}
    assert push(drafter, place, champion=False).sent == 0, "large files are told by another checksum"


def test_the_champion_on_the_hub_outlives_a_push_that_fails(
    hub: type[Hub], drafter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = "hub:someone/drafter"
    first = push(drafter, place, champion=True).drafter
    commit = hub.tags["champion"]
    hub.champions.append(commit)
    newer = made(tmp_path / "newer", seed=1)
    with pytest.raises(ValueError, match="hub:someone/drafter: HfHubHTTPError: .*not now"):
        push(newer, place, champion=True)
    assert hub.tags["champion"] == commit
    assert pull(place, tmp_path / "a", name="champion") == first
    hub.champions[:] = ["no commit"]  # so that the old one cannot be put back either
    with pytest.raises(ValueError, match="not now"):
        push(newer, place, champion=True)
    assert f"hub:someone/drafter has no champion now, it was commit {commit}; push again (HfHub" in caplog.text
    assert "not now" in caplog.text
    assert SECRET not in caplog.text

    hub.champions.clear()
    second = push(newer, place, champion=True).drafter
    assert pull(place, tmp_path / "b", name="champion") == second
    commit = hub.tags["champion"]
    assert commit == hub.tags[second]
    hub.asked.clear()
    assert push(newer, place, champion=True).drafter == second
    assert not [asked for asked in hub.asked if " tag/" in asked or " commit/" in asked], "it is there already"


def test_the_commands_say_what_they_did(drafter: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "registry")

    def dflash(*words: str) -> dict[str, object]:
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *words, "--json"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    pushed = dflash("push", str(drafter), place, "--champion")
    assert pushed["aliases"] == ["latest", "champion"]
    pulled = dflash("pull", place, str(tmp_path / "out"), "--name", "champion")
    assert pulled == {"drafter": pushed["drafter"], "folder": str(tmp_path / "out")}
    assert "has no champion" in error("pull", str(made(tmp_path / "empty")), str(tmp_path / "no"), "--name", "champion")
