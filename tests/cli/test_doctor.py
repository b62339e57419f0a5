"""doctor: why a full store gives no hits, and what to set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache
from tests.cli.stores import CONFIG, fill, names, run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return the path of a config that the namespace names() is of."""
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(page_size=64))
    return path


def with_config(path: Path, text: str) -> Path:
    """Write another config."""
    path.write_text(text)
    return path


def test_a_config_that_shares(config: Path, hicache: Hicache) -> None:
    """With objects under the config's own names the status is 0, and it says how many."""
    fill("full:a", (names(), 5), (names(page_size=16), 3))
    ended = hicache("doctor", "full:a", "--config", config)
    assert (ended.status, ended.err) == (0, "")
    assert "SHARES  this config finds what is stored under its own names: 5 pages" in ended.out
    found = hicache("doctor", "full:a", "--config", config, "--format", "json").json
    assert (found["shares"], found["own_objects"], found["own_pages"]) == (True, 5, 5)
    assert found["namespace"] == names().namespace.digest
    assert [each["relation"] for each in found["namespaces"]] == ["own", "same_model"]


def test_a_full_store_without_hits(config: Path, hicache: Hicache) -> None:
    """The verdict names the field and what to set, of the namespace with the least to change; others follow."""
    fill("full:a", (names(page_size=16), 7), (names(page_size=16, fingerprint="v2"), 9))
    fill("full:a", (names(model_id="qwen"), 2))
    ended = hicache("doctor", "full:a", "--config", config)
    assert ended.status == 1
    verdict, _, details = ended.out.partition("\n\n")[2].partition("\n\n")
    assert verdict.splitlines()[0].startswith(
        "NO HITS the store has objects of this model, and none under this"
    )
    assert f"{names(page_size=16).namespace.digest} with 7 objects, in {config}:" in verdict
    assert "- page_size: set page_size = 16" in verdict and "fingerprint" not in verdict
    assert "page_size is 64 here and 16 there" in details
    assert 'set fingerprint = "v2"' in details
    assert 'another model: "qwen"' in details


def test_advice_that_is_followed_leads_to_sharing(config: Path, hicache: Hicache) -> None:
    """Setting what the document says, as it says it, makes the status 0."""
    fill("full:a", (names(page_size=16, fingerprint="v2"), 7))
    found = hicache("doctor", "full:a", "--config", config, "--format", "json").json
    settings = {each["field"]: each["theirs"] for each in found["namespaces"][0]["differences"]}
    assert settings == {"page_size": 16, "fingerprint": "v2"}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    text = "".join(lines) + CONFIG.format(page_size=64).replace("page_size = 64\n", "")
    assert hicache("doctor", "full:a", "--config", with_config(config, text)).status == 0


def test_bytes_that_differ_cannot_be_shared(config: Path, hicache: Hicache) -> None:
    """Where no setting helps that is said, per field."""
    fill("full:a", (names(), 5))
    text = CONFIG.format(page_size=64).replace("bfloat16", "float16")
    ended = hicache("doctor", "full:a", "--config", with_config(config, text))
    assert ended.status == 1
    assert "- dtype: cannot be shared: its bytes are" in ended.out


def test_another_place_in_the_grid(config: Path, hicache: Hicache) -> None:
    """Objects of the right namespace that are all of other ranks are told apart from hits."""
    fill("full:a", (names(tp_rank=1, tp_size=2, total_kv_heads=16), 5))
    text = "tp_rank = 0\ntp_size = 2\n" + CONFIG.format(page_size=64)
    ended = hicache("doctor", "full:a", "--config", with_config(config, text))
    assert ended.status == 1
    assert "NO HITS the namespace is right, and all of it is of other ranks" in ended.out
    assert "_llama_0_2; set tp_rank" in ended.out


def test_a_manifest_alone_is_not_shared(config: Path, hicache: Hicache) -> None:
    """A cache that was opened and stored nothing has no hits to give, nor is it named as something to share."""
    fill("full:a", (names(), 0), (names(page_size=16), 0))
    ended = hicache("doctor", "full:a", "--config", config)
    assert ended.status == 1
    assert "NO HITS the store is empty" in ended.out


def test_what_is_not_written_down(config: Path, hicache: Hicache) -> None:
    """Of a namespace without a manifest a key is shown, since nothing else is known."""
    fill("full:a", (names(page_size=16), 3), manifests=False)
    ended = hicache("doctor", "full:a", "--config", config)
    assert ended.status == 1
    assert "nothing of this model_id that is written down" in ended.out
    assert "one of its keys: " in ended.out


def test_stores_that_know_less(config: Path, hicache: Hicache) -> None:
    """Without keys the namespaces decide; a store that knows neither is refused."""
    fill("naming:a", (names(), 3))
    assert hicache("doctor", "naming:a", "--config", config).status == 0
    ended = hicache("doctor", "plain:a", "--config", config)
    assert ended.status == 2 and "SupportsListing" in ended.err


def test_json_and_mla(tmp_path: Path, hicache: Hicache) -> None:
    """A config may be JSON, with the latent of MLA described by one head_dim."""
    (tmp_path / "kv").mkdir()
    path = tmp_path / "config.json"
    kv = {"num_layers": 2, "head_dim": 576, "dtype": "bfloat16", "mla": True}
    path.write_text(json.dumps({"model_id": "deep", "page_size": 64, "kv": kv}))
    found = hicache("doctor", tmp_path / "kv", "--config", path, "--format", "json").json
    assert found["fields"]["rank_replicated"] is True
    assert found["fields"]["object_layout"].endswith(":576")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model_id = ", "is not TOML"),
        ("{1", "is not JSON"),
        ('model_id = "x"', "it has no table kv"),
        ("kv = 3", "it has no table kv"),
        ("nonsense = 1\n[kv]\nnum_layers = 1", "nonsense is not an option"),
        ("[kv]\nnonsense = 1", "kv.nonsense is not known"),
        ('[kv]\nnum_layers = 0\nkv_heads = 1\nhead_dim = 1\ndtype = "float16"', "kv.num_layers is 0"),
        ('[kv]\nnum_layers = 1\nhead_dim = 1\ndtype = "float16"', "kv.kv_heads is None"),
        ('[kv]\nnum_layers = 1\nkv_heads = 1\ndtype = "float16"', "kv needs head_dim"),
        ('[kv]\nnum_layers = 1\nkv_heads = 1\nhead_dims = [1]\ndtype = "float16"', "give a list of 2"),
        ('[kv]\nnum_layers = 1\nkv_heads = 1\nhead_dim = 1\ndtype = "half"', "kv.dtype is 'half'"),
        ('[kv]\nnum_layers = 1\nkv_heads = 1\nhead_dim = 1\ndtype = "int8"\nmla = 1', "kv.mla is 1"),
        (
            '[kv]\nnum_layers = 1\nkv_heads = 1\nhead_dim = 1\ndtype = "int8"\npage_size = 7',
            "page_size is 64",
        ),
    ],
)
def test_a_wrong_config(config: Path, hicache: Hicache, text: str, words: str) -> None:
    """What is wrong is named with the file, the field and what would be right."""
    ended = hicache("doctor", "full:a", "--config", with_config(config, text))
    assert (ended.status, ended.out) == (2, "")
    assert str(config) in ended.err and words in ended.err


def test_a_config_that_is_not_there(tmp_path: Path, hicache: Hicache) -> None:
    """A path that leads nowhere, or to a directory, is said to be no config."""
    for path in (tmp_path / "none.toml", tmp_path):
        ended = hicache("doctor", "full:a", "--config", path)
        assert ended.status == 2 and "cannot read the config" in ended.err


def test_in_a_process_of_its_own(config: Path) -> None:
    """The real command's status is what a script can go by."""
    root = config.parent / "kv"
    fill(f"file://{root}", (names(page_size=16), 3))
    done = run("doctor", "kv", "--config", "config.toml", cwd=config.parent)
    assert (done.returncode, done.stderr) == (1, "")
    assert "page_size: set page_size = 16" in done.stdout
    fill(f"file://{root}", (names(), 3))
    assert run("doctor", "kv", "--config", "config.toml", cwd=config.parent).returncode == 0
