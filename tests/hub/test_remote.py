# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The real huggingface_hub client against a Hub on loopback."""

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard, constants
from loopback import closed_port_fixture, hub_fixture, make_plan, plan_fixture  # noqa: F401

from hf_kvq import KVQPlan, PlanError, PlanUnavailableError
from hf_kvq.hub import cards, remote


FILE, WEIGHTS = "kvq_config.json", "kvq.safetensors"
ME, OTHER = "hf_user_me", "hf_user_other"
TENSORS = {"layers.0.k_lambda": torch.rand(2, 8, generator=torch.Generator().manual_seed(0))}
README = b"""---
license: apache-2.0 # as the base model
tags:
- custom_generate
library_name: transformers
---

# Tiny\r\n
My own words, --- and all.
"""


def make_weights_repo(hub, **options) -> str:
    return hub.add("me/tiny", {"README.md": README, "config.json": b"{}", "model.safetensors": b"1234"}, **options)


# --- push ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [{}, TENSORS], ids=["json", "tensors"])
def test_a_repository_of_its_own(hub, tensors):
    plan = make_plan(tensors=tensors)
    info = plan.push_to_hub("me/tiny-kvq", token=ME)
    files = hub.files("me/tiny-kvq")
    assert {name: files[name] for name in plan.files()} == plan.files()
    assert set(files) == {".gitattributes", "README.md", cards.PLOT, *plan.files()} and info.pr_url is None
    assert info.oid == hub.repos["me/tiny-kvq"].refs["main"]
    assert KVQPlan.from_pretrained("me/tiny-kvq") == plan
    # The same again is no commit; another one replaces everything of ours.
    assert plan.push_to_hub("me/tiny-kvq", token=ME).oid == info.oid
    other = make_plan(fidelity={"kl": 0.5})
    other.push_to_hub("me/tiny-kvq", token=ME)
    assert set(hub.files("me/tiny-kvq")) == {".gitattributes", "README.md", cards.PLOT, FILE}
    assert KVQPlan.from_pretrained("me/tiny-kvq") == other and b"0.5" in hub.files("me/tiny-kvq")["README.md"]


def test_the_card_of_a_repository_of_its_own(hub, plan):
    plan.push_to_hub("me/tiny-kvq", token=ME)
    text = hub.files("me/tiny-kvq")["README.md"].decode()
    data = ModelCard(text).data.to_dict()
    ((result,),) = (entry.pop("results") for entry in data["model-index"])
    assert result["metrics"][0]["type"] == "kl_divergence" and result["metrics"][0]["value"] == 0.012
    assert data == {
        "base_model": "me/tiny",
        "base_model_relation": "quantized",
        "library_name": "hf-kvq",
        "pipeline_tag": "text-generation",
        "tags": ["hf-kvq", "kv-cache", "kv-cache-quantization", "pmkvq"],
        "datasets": ["me/essays"],
        "model-index": [{"name": "tiny-kvq"}],
    }
    assert "| 8 | 8 | 0 | 1 |\n| 4 | 4 | 1 | 1 |\n" in text and "| 0 | 0.012 |" in text and "| n | 16 |" in text
    assert 'cache_config={"plan": "me/tiny-kvq"}' in text and "None" not in text
    # Somebody's own page in its place is kept.
    own = text.replace(cards.MARKER, "my words")
    hub.add("me/tiny-kvq", {"README.md": own.encode()})
    make_plan(fidelity={}).push_to_hub("me/tiny-kvq", token=ME)
    assert hub.files("me/tiny-kvq")["README.md"].decode() == own


def test_beside_weights_only_tags_are_added(hub, plan):
    make_weights_repo(hub)
    plan.push_to_hub("me/tiny", path_in_repo="kvq/pmkvq-2bit", token=ME)
    files = hub.files("me/tiny")
    assert files.pop("kvq/pmkvq-2bit/" + FILE) == plan.files()[FILE]
    readme = files.pop("README.md")
    assert files == {"config.json": b"{}", "model.safetensors": b"1234"}
    assert readme.split(b"---\n", 2)[2] == README.split(b"---\n", 2)[2]
    before, after = (yaml.safe_load(text.split(b"---\n")[1]) for text in (README, readme))
    assert after == {**before, "tags": ["custom_generate", *cards.tags(plan)]}
    # A second variant changes nothing more there.
    make_plan(tensors=TENSORS).push_to_hub("me/tiny", path_in_repo="kvq/other", token=ME)
    assert hub.files("me/tiny")["README.md"] == readme
    assert KVQPlan.from_pretrained("me/tiny", subfolder="kvq/other").tensors.keys() == TENSORS.keys()


@pytest.mark.parametrize(
    "readme", [b"no metadata\n", b"---\n{: broken\n---\nx\n", b"---\n- a list\n---\n", b"\xff\xfe", None]
)
def test_odd_readmes_survive(hub, plan, readme):
    hub.add("me/odd", {"config.json": b"{}", **({"README.md": readme} if readme is not None else {})})
    plan.push_to_hub("me/odd", path_in_repo="kvq", token=ME)
    files = hub.files("me/odd")
    assert files["kvq/" + FILE] == plan.files()[FILE]
    if readme is None:
        assert "README.md" not in files
    else:
        assert files["README.md"].endswith(readme)


def test_pull_requests_and_branches(hub, plan):
    main_ = make_weights_repo(hub)
    info = plan.push_to_hub("me/tiny", path_in_repo="kvq", token=OTHER, create_pr=True)
    assert info.pr_url == f"{hub.url}/me/tiny/discussions/1" and hub.repos["me/tiny"].refs["main"] == main_
    assert KVQPlan.from_pretrained("me/tiny", subfolder="kvq", revision="refs/pr/1") == plan
    with pytest.raises(PlanUnavailableError, match=r"has no kvq/kvq_config.json at revision main$"):
        KVQPlan.from_pretrained("me/tiny", subfolder="kvq")
    other = make_plan(fidelity={})
    other.push_to_hub("me/tiny", path_in_repo="kvq", token=ME, revision="refs/pr/1")
    other.push_to_hub("me/tiny", path_in_repo="kvq", token=ME, revision="dev", commit_message="Mine")
    for revision in ("refs/pr/1", "dev"):
        assert KVQPlan.from_pretrained("me/tiny", subfolder="kvq", revision=revision) == other
    assert hub.repos["me/tiny"].refs["main"] == main_


def test_a_change_in_between_is_noticed(hub, plan):
    make_weights_repo(hub)
    hub.before_commit = lambda: hub.add("me/tiny", {"README.md": b"new words"})
    with pytest.raises(PlanUnavailableError, match="me/tiny at revision main: somebody else changed"):
        plan.push_to_hub("me/tiny", path_in_repo="kvq", token=ME)
    assert hub.files("me/tiny")["README.md"] == b"new words"
    plan.push_to_hub("me/tiny", path_in_repo="kvq", token=ME)
    assert hub.files("me/tiny")["README.md"].endswith(b"new words")


@pytest.mark.parametrize(
    ("repo", "token", "options", "message"),
    [
        ("me/tiny", None, {}, "refuses this.*401.*log in with `hf auth login`, or pass token="),
        ("me/tiny", OTHER, {}, "refuses this.*403.*check what your token may do"),
        ("me/new", OTHER, {}, "refuses this.*403"),
        ("me/none", ME, {"create_pr": True}, "there is no repository me/none, or it is private"),
        ("me/tiny", ME, {"revision": "refs/pr/7"}, "no such branch, tag or commit"),
        ("a/b/c", ME, {}, "neither a folder nor the id of a repository"),
    ],
)
def test_refused_pushes_say_why(hub, plan, repo, token, options, message):
    before = make_weights_repo(hub)
    with pytest.raises(PlanUnavailableError, match=message):
        plan.push_to_hub(repo, path_in_repo="kvq", token=token, **options)
    assert hub.repos["me/tiny"].refs["main"] == before


# --- pull ------------------------------------------------------------------------------------------------------------


def test_tags_commits_and_a_moving_main(hub):
    plans = [make_plan(fidelity={"kl": i}, tensors={"x": torch.full((4,), float(i))}) for i in range(3)]
    commits = []
    for plan in plans:
        commits.append(plan.push_to_hub("me/tiny-kvq", token=ME).oid)
        HfApi(token=ME).create_tag("me/tiny-kvq", tag=f"v{len(commits)}")
    for plan, commit, tag in zip(plans, commits, ("v1", "v2", "v3")):
        assert KVQPlan.from_pretrained("me/tiny-kvq", revision=tag) == plan
        assert KVQPlan.from_pretrained("me/tiny-kvq", revision=commit) == plan
    assert KVQPlan.from_pretrained("me/tiny-kvq") == plans[-1]


def test_tensors_come_from_the_commit_of_the_config(hub, monkeypatch):
    old = make_plan(tensors={"x": torch.zeros(4)})
    new = make_plan(tensors={"x": torch.ones(4)})
    hub.add("me/tiny-kvq", old.files())
    download = remote.hf_hub_download

    def moving(repo_id, filename, **kwargs):
        path = download(repo_id, filename, **kwargs)
        if filename == FILE:
            hub.add("me/tiny-kvq", new.files())
        return path

    monkeypatch.setattr(remote, "hf_hub_download", moving)
    assert KVQPlan.from_pretrained("me/tiny-kvq") == old


@pytest.mark.parametrize("how", ["local_files_only", "HF_HUB_OFFLINE", "commit", "gone"])
def test_second_use_without_network(hub, how, monkeypatch):
    plan = make_plan(tensors=TENSORS)
    commit = plan.push_to_hub("me/tiny-kvq", token=ME).oid
    assert KVQPlan.from_pretrained("me/tiny-kvq") == plan
    hub.requests.clear()
    options = {}
    if how == "local_files_only":
        options = {"local_files_only": True}
    elif how == "commit":
        options = {"revision": commit}
    elif how == "HF_HUB_OFFLINE":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        del hub.repos["me/tiny-kvq"]
        with pytest.raises(PlanUnavailableError, match="there is no repository me/tiny-kvq"):
            KVQPlan.from_pretrained("me/tiny-kvq", force_download=True)
        options = {"local_files_only": True}
        hub.requests.clear()
    assert KVQPlan.from_pretrained("me/tiny-kvq", **options) == plan
    assert hub.requests == []


def test_private_repositories(hub, plan):
    plan.push_to_hub("me/secret", private=True, token=ME)
    assert hub.repos["me/secret"].private
    for token in (None, False, OTHER):
        with pytest.raises(PlanUnavailableError, match="there is no repository me/secret, or it is private"):
            KVQPlan.from_pretrained("me/secret", token=token)
    assert KVQPlan.from_pretrained("me/secret", token=ME) == plan


@pytest.mark.parametrize(
    ("repo", "options", "message"),
    [
        ("me/none", {}, f"{FILE} of me/none at revision main: there is no repository me/none, or it is private"),
        ("me/tiny", {}, f"me/tiny has no {FILE} at revision main; it has plans in kvq/a: choose one with subfolder="),
        ("me/tiny", {"subfolder": "kvq/b"}, f"me/tiny has no kvq/b/{FILE} at revision main; it has plans in kvq/a"),
        ("me/tiny", {"revision": "v9"}, f"{FILE} of me/tiny at revision v9: the repository has no such branch, tag"),
        ("me/gated", {}, f"{FILE} of me/gated at revision main: the repository is gated; ask for access at http"),
        ("me/lost", {}, f"{WEIGHTS} of me/lost at revision [0-9a-f]+: the repository has no such file"),
        ("me/tiny", {"local_files_only": True}, "not in the cache, and the Hub must not be asked: local_files_only"),
        ("not an id", {}, "'not an id' is neither a folder nor the id of a repository"),
        ("some/local/folder", {}, "there is no folder some/local/folder"),
    ],
)
def test_what_is_missing_is_named(hub, plan, repo, options, message):
    make_weights_repo(hub)
    hub.add("me/tiny", {f"kvq/a/{FILE}": plan.files()[FILE]})
    hub.add("me/gated", plan.files(), gated=True)
    hub.add("me/lost", {FILE: make_plan(tensors=TENSORS).files()[FILE]})
    with pytest.raises(PlanUnavailableError, match=message) as caught:
        KVQPlan.from_pretrained(repo, **options)
    assert len(str(caught.value).splitlines()) == 1


def test_damaged_files_name_the_repository_and_the_commit(hub):
    files = make_plan(tensors=TENSORS).files()
    damages = {
        "json": {FILE: files[FILE][:-9]},
        "tensors": {WEIGHTS: files[WEIGHTS][:-1]},
        "swapped": {WEIGHTS: make_plan(tensors={"layers.0.k_lambda": torch.zeros(2, 8)}).files()[WEIGHTS]},
    }
    for name, damage in damages.items():
        commit = hub.add(f"me/{name}", {**files, **damage})
        bad = next(iter(damage))
        with pytest.raises(PlanError, match=f"{bad} of me/{name} at {commit} cannot be used: "):
            KVQPlan.from_pretrained(f"me/{name}")


def test_no_network_and_bad_proxies(hub, plan, closed_port, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.add("me/tiny-kvq", plan.files())
    hub.dropped_headers.add("X-Repo-Commit")
    with pytest.raises(PlanUnavailableError, match="X-Repo-Commit|commit hash"):
        KVQPlan.from_pretrained("me/tiny-kvq")
    template = f"http://127.0.0.1:{closed_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port}")
    with pytest.raises(PlanUnavailableError, match="the Hub cannot be reached.*check the network, a proxy and HF_END"):
        KVQPlan.from_pretrained("me/tiny-kvq")
    with pytest.raises(PlanUnavailableError, match="me/x at revision main: .*check the network"):
        plan.push_to_hub("me/x", token=ME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PlanUnavailableError, match="must not be asked: HF_HUB_OFFLINE is set"):
        KVQPlan.from_pretrained("me/tiny-kvq")
    with pytest.raises(PlanUnavailableError, match="me/x at revision main: HF_HUB_OFFLINE is set"):
        plan.push_to_hub("me/x", token=ME)


def test_xet(hub, tmp_path, monkeypatch):
    hf_xet = pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    # A folder in place of the storage server: not a documented feature of hf_xet.
    (tmp_path / "storage").mkdir()
    hub.xet = str(tmp_path / "storage")
    plan = make_plan(tensors={"x": torch.rand(40_000)})
    path = tmp_path / WEIGHTS
    path.write_bytes(plan.files()[WEIGHTS])
    sha256 = plan.files()[FILE].split(b'"sha256": "')[1][:64].decode()
    hub.xet_hashes[sha256] = hf_xet.hash_files([str(path)])[0].hash
    plan.push_to_hub("me/tiny-kvq", token=ME)
    assert hub.files("me/tiny-kvq")[WEIGHTS] is None and not hub.lfs
    assert any("xet-write-token" in request for request in hub.requests)
    assert KVQPlan.from_pretrained("me/tiny-kvq") == plan
    assert any("xet-read-token" in request for request in hub.requests)
