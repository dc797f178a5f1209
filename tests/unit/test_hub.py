"""Push and pull against a Hub in miniature: what arrives, what is refused, what survives faults, what stays secret."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from dflash2_train.config import UserError
from dflash2_train.export.commands import dispatch
from dflash2_train.export.hf import export_hf
from dflash2_train.export.hub.client import redacted
from dflash2_train.export.hub.pull import pull
from dflash2_train.export.hub.push import git_hash, plan_push, push
from dflash2_train.export.payload import ALL_FILES
from dflash2_train.provenance import sha256_file
from tests.cases import RECORD, edit_json, make_drafter, make_target_info, tiny_run_config
from tests.contract.tiny_gguf import gguf_parts, write_gguf
from tests.stub_hub import CUT, TOKEN, Answer, StubHub

REPO = "somebody/tiny-DFlash2"
# The library's LFS upload hands a file to httpx2 in a way that it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One export for the whole module; tests edit copies."""
    root = tmp_path_factory.mktemp("hub")
    config = tiny_run_config(root)
    record = {**RECORD, "source": {"run_id": "tiny-1a2b", "step": 20, "checkpoint": "step000020"}}
    return export_hf(make_drafter(config), config, make_target_info(config), root / "out", run_record=record)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "out"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    """The Hub, a user who is signed in, an empty cache, no waiting between tries."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    close_session()
    with StubHub() as server:
        yield server
    close_session()


def names(hub: StubHub, revision: str = "main") -> set[str]:
    return set(hub.repositories[REPO].files(revision) or {})


def push_to(hub: StubHub, folder: Path, **options: object) -> str:
    return push(plan_push(folder), REPO, endpoint=hub.endpoint, **options).commit  # type: ignore[arg-type]


def test_a_push_creates_a_private_repository_with_the_listed_files_and_names_the_run(
    hub: StubHub, folder: Path
) -> None:
    (folder / "notes.txt").write_text("mine")
    commit = push_to(hub, folder)
    repository = hub.repositories[REPO]
    assert repository.private
    assert names(hub) == {*ALL_FILES, ".gitattributes"}
    held = repository.commits[commit]
    assert all(held[name].content == (folder / name).read_bytes() for name in ALL_FILES)
    record = json.loads((folder / "run.json").read_text())
    assert repository.messages[-1].startswith("Drafter tiny, run tiny-1a2b, step 20\n")
    assert record["record_sha256"] in repository.messages[-1]
    assert len(repository.messages) == 2  # the first one is the Hub's own


def test_a_dry_run_lists_names_sizes_and_hashes_and_asks_nobody(
    hub: StubHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "notes.txt").write_text("mine")
    assert dispatch(["push", str(folder), REPO, "--dry-run", "--endpoint", hub.endpoint]) == 0
    shown = capsys.readouterr().out
    for name in ALL_FILES:
        assert name in shown
        assert f"{(folder / name).stat().st_size:,}" in shown
        assert sha256_file(folder / name) in shown
    assert "stays here: notes.txt" in shown
    assert hub.requests == []


def test_a_second_push_sends_nothing_again_and_makes_no_commit(hub: StubHub, folder: Path) -> None:
    first = push_to(hub, folder)
    puts = hub.count("PUT", "/storage/")
    assert push_to(hub, folder) == first
    assert hub.count("PUT", "/storage/") == puts
    assert len(hub.repositories[REPO].messages) == 2


def test_a_push_that_was_cut_goes_on_without_the_files_that_arrived(hub: StubHub, folder: Path) -> None:
    hub.fail("POST", "/commit/", *[Answer(500)] * 100)
    with pytest.raises(UserError, match="500"):
        push_to(hub, folder)
    assert names(hub) == {".gitattributes"}  # nothing is visible before the commit
    arrived = hub.count("PUT", "/storage/")
    assert arrived == 2
    hub.faults.clear()
    push_to(hub, folder)
    assert hub.count("PUT", "/storage/") == arrived
    assert names(hub) >= set(ALL_FILES)


@pytest.mark.parametrize(
    ("method", "pattern", "happenings"),
    [
        ("GET", "/api/models/", [503]),
        ("POST", "/api/repos/create", [500]),
        ("POST", "/preupload/", [429, 502]),
        ("POST", "/objects/batch", [504]),
        ("PUT", "/storage/", [500, 500]),
        ("PUT", "/storage/", [CUT]),
        ("POST", "/commit/", [503]),
        ("POST", "/commit/", [CUT]),
        ("POST", "/paths-info/", [500]),
    ],
)
def test_a_passing_fault_costs_a_try_and_nothing_else(
    hub: StubHub, folder: Path, method: str, pattern: str, happenings: list[object]
) -> None:
    hub.fail(method, pattern, *happenings)
    push_to(hub, folder)
    assert names(hub) >= set(ALL_FILES)
    assert len(hub.repositories[REPO].messages) == 2
    assert not hub.faults[0][2]  # it did happen


def test_a_commit_whose_answer_is_lost_is_not_made_twice(
    hub: StubHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = hub.commit
    lost = iter([True])

    def commit(*words: object) -> object:
        done = make(*words)  # type: ignore[arg-type]
        return Answer(502) if next(lost, False) else done

    monkeypatch.setattr(hub, "commit", commit)
    push_to(hub, folder)
    assert len(hub.repositories[REPO].messages) == 2


def test_another_branch_is_made_and_main_stays(hub: StubHub, folder: Path) -> None:
    push_to(hub, folder, revision="try-1")
    assert names(hub, "try-1") >= set(ALL_FILES)
    assert names(hub) == {".gitattributes"}


def test_a_public_repository_is_refused_unless_it_is_meant(hub: StubHub, folder: Path) -> None:
    hub.add(REPO, {}, private=False)
    with pytest.raises(UserError, match="--public"):
        push_to(hub, folder)
    assert names(hub) == set()
    push_to(hub, folder, public=True)
    assert names(hub) == set(ALL_FILES)


def test_public_makes_a_new_repository_public_but_never_opens_a_private_one(
    hub: StubHub, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    push_to(hub, folder, public=True)
    assert not hub.repositories[REPO].private
    hub.add(REPO, {}, private=True)
    push_to(hub, folder, public=True)
    assert hub.repositories[REPO].private
    assert "stays private" in caplog.text


def test_weights_of_another_drafter_there_are_refused_and_removed_only_on_demand(hub: StubHub, folder: Path) -> None:
    hub.add(REPO, {"model-00001-of-00002.safetensors": b"old", "logo.svg": b"<svg/>"})
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors.*--replace"):
        push_to(hub, folder)
    push_to(hub, folder, replace=True)
    assert names(hub) == set(ALL_FILES)


def test_another_content_on_the_hub_than_was_checked_is_told(
    hub: StubHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_push(folder)
    (folder / "README.md").write_text((folder / "README.md").read_text() + "edited while it was pushed")
    monkeypatch.setattr("dflash2_train.export.hub.push.git_hash", lambda _path: git_hash(plan.folder / "config.json"))
    with pytest.raises(UserError, match=r"another content of .*README\.md"):
        push(plan, REPO, endpoint=hub.endpoint)


@pytest.mark.parametrize(
    ("pattern", "happening", "text"),
    [
        ("/api/repos/create", Answer(401), "401.*hf auth login"),
        ("/api/repos/create", Answer(403, "GatedRepo"), "gated.*accept its terms"),
        ("/api/repos/create", Answer(403, message="read-only token"), "403.*may write.*read-only token"),
        ("/api/repos/create", Answer(418, message="teapot"), "418.*teapot"),
        ("/preupload/", Answer(404, "RepoNotFound"), "no such repository"),
        ("/objects/batch", Answer(403, message="storage is full"), "403.*storage is full"),
    ],
)
def test_an_answer_that_stays_is_told_with_the_next_step_and_asked_once(
    hub: StubHub, folder: Path, pattern: str, happening: Answer, text: str
) -> None:
    hub.fail("POST", pattern, *[happening] * 9)
    with pytest.raises(UserError, match=f"(?s){text}"):
        push_to(hub, folder)
    assert hub.count("POST", pattern) == 1
    assert REPO not in hub.repositories or len(hub.repositories[REPO].messages) == 1


def test_without_a_token_nothing_is_asked(hub: StubHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="no Hub token"):
        push_to(hub, folder)
    assert hub.requests == []


def test_without_a_network_the_message_says_so(hub: StubHub, folder: Path) -> None:
    hub.server.shutdown()
    hub.server.server_close()
    with pytest.raises(UserError, match="no connection to http://127"):
        push_to(hub, folder)
    with pytest.raises(UserError, match="no connection to http://127"):
        pull(REPO, folder.parent / "fetched", endpoint=hub.endpoint)
    assert not (folder.parent / "fetched").exists()


def test_a_faulty_or_edited_drafter_never_leaves(hub: StubHub, folder: Path) -> None:
    (folder / "README.md").write_text("better numbers")
    with pytest.raises(UserError, match=r"README\.md changed after the export"):
        plan_push(folder)
    (folder / "run.json").unlink()
    with pytest.raises(UserError, match=r"has no run\.json"):
        plan_push(folder)
    with pytest.raises(UserError, match="no such folder"):
        plan_push(folder / "nowhere")


def gguf_folder(folder: Path, to: Path) -> Path:
    """GGUF files of the drafter in ``folder`` with the record that the export writes."""
    pytest.importorskip("gguf")
    to.mkdir()
    path = write_gguf(to / "tiny-BF16.gguf", gguf_parts(folder))
    weights = sha256_file(folder / "model.safetensors")
    files = {path.name: {"type": "BF16", "sha256": sha256_file(path)}}
    record = {
        "tool": "dflash2-train",
        "config": {"name": "tiny"},
        "source": {"drafter": {"model.safetensors": weights}},
    }
    (to / "gguf.json").write_text(json.dumps({**record, "files": files}))
    (to / "README.md").write_text("---\nlicense: mit\n---\n")
    return to


def test_gguf_files_go_with_their_record_once_the_doctor_agrees(
    hub: StubHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash2_train.export.hub import push as module

    ggufs = gguf_folder(folder, folder.parent / "ggufs")
    monkeypatch.setattr(module, "refuse_errors", lambda *_: None)  # the tiny drafter is too narrow for llama.cpp
    push_to(hub, ggufs)
    assert names(hub) == {"tiny-BF16.gguf", "gguf.json", "README.md", ".gitattributes"}
    weights = sha256_file(folder / "model.safetensors")
    assert hub.repositories[REPO].messages[-1].startswith(f"Drafter tiny as GGUF, of weights {weights[:12]}\n")


def test_faulty_edited_or_unclean_gguf_files_never_leave(folder: Path) -> None:
    ggufs = gguf_folder(folder, folder.parent / "ggufs")
    with pytest.raises(UserError, match="would not serve as trained"):
        plan_push(ggufs)
    record = (ggufs / "gguf.json").read_text()
    edit_json(ggufs / "gguf.json", config__run_dir="/home/somebody/runs")
    with pytest.raises(UserError, match="kept local paths"):
        plan_push(ggufs)
    (ggufs / "gguf.json").write_text(record)
    (ggufs / "tiny-BF16.gguf").write_bytes((ggufs / "tiny-BF16.gguf").read_bytes()[:-1])
    with pytest.raises(UserError, match=r"tiny-BF16\.gguf changed after the export"):
        plan_push(ggufs)


def test_what_the_doctor_finds_stops_a_push(hub: StubHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash2_train.export.hub import push as module

    edit_json(folder / "config.json", is_causal=True)
    monkeypatch.setattr(module, "changed_files", lambda *_: [])  # as if exported so
    with pytest.raises(UserError, match="would not serve as trained"):
        plan_push(folder)
    assert hub.requests == []


def test_a_token_in_the_papers_stops_a_push(pristine: Path, tmp_path: Path) -> None:
    config = tiny_run_config(tmp_path)
    config.train.wandb_project = TOKEN
    out = export_hf(make_drafter(config), config, make_target_info(config), tmp_path / "out", run_record=RECORD)
    with pytest.raises(UserError, match="looks like a Hub token") as caught:
        plan_push(out)
    assert TOKEN not in str(caught.value)


def test_no_token_and_no_signed_url_reaches_output_logs_or_files(
    hub: StubHub, folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.fail("PUT", "/storage/", 500, CUT)
    hub.fail("POST", "/commit/", *[Answer(403, message=f"token {TOKEN} may only read")] * 9)
    assert dispatch(["push", str(folder), REPO, "--endpoint", hub.endpoint]) == 2
    shown = capfd.readouterr()
    everything = shown.out + shown.err + caplog.text
    everything += "".join(path.read_text(errors="replace") for path in folder.iterdir())
    assert "token … may only read" in shown.err
    assert TOKEN not in everything
    assert "secretsignature" not in everything
    assert f"Bearer {TOKEN}" in hub.tokens  # it was sent


def test_redaction_knows_the_token_what_looks_like_one_and_signed_urls() -> None:
    text = "Bearer abc and secret, hf_abcdefghijklmnop1234, https://s3.host/a?X-Amz-Signature=1&b=2 end"
    assert redacted(text, "secret") == "Bearer … and …, hf_…, https://s3.host/a?… end"


def pull_from(hub: StubHub, to: Path, **options: object) -> Path:
    return pull(REPO, to, endpoint=hub.endpoint, **options).folder  # type: ignore[arg-type]


def test_a_pull_gives_the_pushed_files_and_records_commit_and_hashes(hub: StubHub, folder: Path) -> None:
    commit = push_to(hub, folder)
    fetched = pull_from(hub, folder.parent / "fetched", revision="main")
    assert {path.name for path in fetched.iterdir()} == {*ALL_FILES, "pulled.json"}
    assert all((fetched / name).read_bytes() == (folder / name).read_bytes() for name in ALL_FILES)
    note = json.loads((fetched / "pulled.json").read_text())
    assert (note["repo_id"], note["revision"], note["commit"]) == (REPO, "main", commit)
    assert note["files"] == {name: sha256_file(folder / name) for name in sorted(ALL_FILES)}
    assert dispatch(["verify-provenance", str(fetched)]) == 0


def test_a_pinned_commit_is_fetched_whatever_the_branch_became(hub: StubHub, folder: Path) -> None:
    commit = push_to(hub, folder)
    repository = hub.repositories[REPO]
    repository.commit("main", {}, "emptied")
    fetched = pull_from(hub, folder.parent / "fetched", revision=commit)
    assert (fetched / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_second_pull_of_the_same_commit_fetches_nothing(hub: StubHub, folder: Path) -> None:
    push_to(hub, folder)
    to = folder.parent / "fetched"
    pull_from(hub, to)
    before = hub.count("GET", "/resolve/")
    assert pull(REPO, to, endpoint=hub.endpoint).was_there
    assert hub.count("GET", "/resolve/") == before


def test_a_newer_commit_replaces_an_earlier_pull_unless_somebody_changed_it(hub: StubHub, folder: Path) -> None:
    push_to(hub, folder)
    to = folder.parent / "fetched"
    pull_from(hub, to)
    hub.repositories[REPO].commit("main", dict(hub.repositories[REPO].files("main") or {}), "again")
    assert not pull(REPO, to, endpoint=hub.endpoint).was_there
    (to / "config.json").write_text("{}")
    with pytest.raises(UserError, match="changed since it was pulled"):
        pull_from(hub, to)
    assert (to / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("method", "pattern", "happenings"),
    [
        ("GET", "/api/models/", [500]),
        ("GET", "/tree/", [503]),
        ("HEAD", "/resolve/", [502]),
        ("GET", r"/resolve/.*/model\.safetensors", [500]),
        ("GET", r"/resolve/.*/model\.safetensors", [CUT]),
    ],
)
def test_a_passing_fault_does_not_spoil_a_pull(
    hub: StubHub, folder: Path, method: str, pattern: str, happenings: list[object]
) -> None:
    push_to(hub, folder)
    hub.fail(method, pattern, *happenings)
    fetched = pull_from(hub, folder.parent / "fetched")
    assert (fetched / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert not hub.faults[0][2]


def test_a_pull_that_was_cut_leaves_no_folder_and_goes_on_with_what_arrived(hub: StubHub, folder: Path) -> None:
    push_to(hub, folder)
    to = folder.parent / "fetched"
    hub.fail("GET", r"/resolve/.*/model\.safetensors", *[Answer(500)] * 100)
    with pytest.raises(UserError, match=r"fetching model\.safetensors of"):
        pull_from(hub, to)
    assert not to.exists()
    hub.faults.clear()
    small = hub.count("GET", r"/resolve/.*/config\.json")
    pull_from(hub, to)
    assert hub.count("GET", r"/resolve/.*/config\.json") == small
    assert [path.name for path in to.parent.iterdir() if path.name.startswith(".")] == []


def edited_on_the_hub(hub: StubHub, name: str, content: bytes) -> None:
    repository = hub.repositories[REPO]
    files = dict(repository.files("main") or {})
    files[name] = type(files[name])(content, files[name].lfs)
    repository.commit("main", files, "edited by hand")


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", "run.json"])
def test_a_file_that_is_not_what_was_exported_is_refused_and_nothing_is_kept(
    hub: StubHub, folder: Path, name: str
) -> None:
    push_to(hub, folder)
    content = (folder / name).read_bytes()
    edited_on_the_hub(
        hub, name, content.replace(b'"step": 20', b'"step": 21') if name == "run.json" else content + b" "
    )
    with pytest.raises(UserError, match=rf"{name} are not what run\.json"):
        pull_from(hub, folder.parent / "fetched")
    assert {path.name for path in folder.parent.iterdir()} <= {"out", "cache"}


def test_a_record_that_lists_a_path_outside_is_refused(hub: StubHub, folder: Path) -> None:
    push_to(hub, folder)
    record = json.loads((folder / "run.json").read_text())
    record["files"]["../evil"] = "0" * 64
    edited_on_the_hub(hub, "run.json", json.dumps(record).encode())
    hub.repositories[REPO].files("main")["../evil"] = hub.repositories[REPO].files("main")["README.md"]  # type: ignore[index]
    with pytest.raises(UserError, match="lead out of the folder"):
        pull_from(hub, folder.parent / "fetched")
    assert not (folder.parent / "evil").exists()


def test_repositories_that_are_no_drafter_of_ours_are_refused(hub: StubHub, folder: Path) -> None:
    to = folder.parent / "fetched"
    for files, text in (
        ({"weights.bin": b"x"}, r"has no config\.json"),
        ({"config.json": b"not json"}, "is no JSON object"),
        ({"config.json": b'{"architectures": ["LlamaForCausalLM"]}'}, "is no DFlash drafter"),
        ({"config.json": (folder / "config.json").read_bytes()}, "--without-record"),
    ):
        hub.add(REPO, files)
        with pytest.raises(UserError, match=text):
            pull_from(hub, to)
        assert not to.exists()


def test_a_drafter_without_a_record_is_taken_on_demand_with_the_hubs_hashes(hub: StubHub, folder: Path) -> None:
    files = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors", "README.md")}
    hub.add(REPO, {**files, ".gitattributes": b"x", "code.py": b"raise SystemExit"})
    to = pull_from(hub, folder.parent / "fetched", without_record=True)
    assert {path.name for path in to.iterdir()} == {*files, "pulled.json"}


@pytest.mark.parametrize(
    ("repo_id", "revision", "gated", "text"),
    [
        ("somebody/else", None, False, "no such repository"),
        (REPO, "nowhere", False, "no such revision"),
        (REPO, None, True, "accept its terms"),
        ("not a name", None, False, "not a name"),
    ],
)
def test_a_pull_of_what_is_not_there_or_not_allowed_is_told(
    hub: StubHub, folder: Path, repo_id: str, revision: str | None, gated: bool, text: str
) -> None:
    hub.add(REPO, {"config.json": b"{}"}, gated=gated)
    with pytest.raises(UserError, match=text):
        pull(repo_id, folder.parent / "fetched", revision=revision, endpoint=hub.endpoint)
    assert not (folder.parent / "fetched").exists()


def test_a_public_drafter_needs_no_token(hub: StubHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push_to(hub, folder, public=True)
    monkeypatch.delenv("HF_TOKEN")
    hub.tokens.clear()
    pull_from(hub, folder.parent / "fetched")
    assert set(hub.tokens) == {None}
    hub.repositories[REPO].private = True
    with pytest.raises(UserError, match=r"401.*hf auth login"):
        pull_from(hub, folder.parent / "other")


def test_a_folder_that_no_pull_of_this_repository_wrote_is_left_alone(hub: StubHub, folder: Path) -> None:
    push_to(hub, folder)
    with pytest.raises(UserError, match="was written by no pull"):
        pull_from(hub, folder)
    other = folder.parent / "other"
    other.mkdir()
    (other / "pulled.json").write_text('{"repo_id": "somebody/else", "commit": "0", "files": {}}')
    with pytest.raises(UserError, match="was pulled from somebody/else"):
        pull_from(hub, other)
    assert [path.name for path in other.iterdir()] == ["pulled.json"]
