"""Dumps of RL trainers: their fields, what is refused, and the certificate of zero mismatch."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ottava.base.untrusted import UntrustedError
from ottava.serving.rollout import FORMATS, Rollout, batches, certify, read_rollout
from sweep import sweep

IDS = torch.tensor([[0, 0, 5, 6, 7, 8, 9, 0], [0, 3, 4, 5, 11, 12, 0, 0]])
"""Two sequences with padding on both sides, three and four columns of which are prompts."""
PRESENT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0, 0]])
ROLLOUT = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
TRAINED = torch.tensor([-1.5, -2.5, -3.5, -4.5, -5.5])
"""Of the compared tokens 7, 8, 9 and 11, 12."""


def padded(values: Tensor) -> Tensor:
    """(2, 4): the answers' columns."""
    return torch.tensor([[*values[:3], 0.0], [*values[3:], 0.0, 0.0]])


def _verl() -> dict[str, Tensor]:
    return {
        "prompts": IDS[:, :4],
        "responses": IDS[:, 4:],
        "attention_mask": PRESENT,
        "response_mask": PRESENT[:, 4:],
        "rollout_log_probs": padded(ROLLOUT),
        "old_log_probs": padded(TRAINED),
    }


def _trl() -> dict[str, Tensor]:
    return {
        "prompt_ids": IDS[:, :4],
        "completion_ids": IDS[:, 4:],
        "prompt_mask": PRESENT[:, :4],
        "completion_mask": PRESENT[:, 4:],
        "sampling_per_token_logps": padded(ROLLOUT),
        "old_per_token_logps": padded(TRAINED),
    }


def _nemo() -> list[dict[str, Any]]:
    """Rows as `log_batched_dict_as_jsonl` writes them: each is a batch of one."""
    rows = []
    ids = ([5, 6, 7, 8, 9, 0], [3, 4, 5, 11, 12, 0])
    for one, prompt, part in zip(ids, (2, 3), (slice(0, 3), slice(3, 5)), strict=True):
        lists = {name: [0.0] * prompt + values[part].tolist() + [0.0] * (6 - prompt - len(values[part]))
                 for name, values in (("generation_logprobs", ROLLOUT), ("prev_logprobs", TRAINED))}  # fmt: skip
        lists |= {"token_ids": one, "token_loss_mask": [0] * prompt + [1] * (6 - prompt)}
        rows.append(
            {name: [values] for name, values in lists.items()} | {"input_lengths": [5], "sample_loss_mask": [1.0]}
        )
    return rows


def _plain() -> list[dict[str, Any]]:
    names = {"generation_logprobs": "rollout_raw_logprob", "prev_logprobs": "prev_recompute_raw_logprob"}
    names |= {"input_lengths": "lengths", "token_loss_mask": "mask"}
    return [{names.get(k, k): v[0] for k, v in row.items() if k != "sample_loss_mask"} for row in _nemo()]


def written(name: str, folder: Path) -> Path:
    """The dump of one trainer."""
    if name in ("verl", "trl"):
        tensors = {k: v.contiguous() for k, v in (_verl if name == "verl" else _trl)().items()}
        if name == "verl":
            torch.save(tensors, folder / "a.pt")
            return folder / "a.pt"
        save_file(tensors, folder / "a.safetensors")
        return folder / "a.safetensors"
    rows = _nemo() if name == "nemo-rl" else _plain()
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder / "a.jsonl"


@sweep(name=FORMATS)
def test_every_format_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    found = read_rollout(written(name, tmp_path))
    assert found.format == name
    assert [one.tolist() for one in found.ids] == [[5, 6, 7, 8, 9], [3, 4, 5, 11, 12]]
    assert [one.tolist() for one in found.at] == [[2, 3, 4], [3, 4]]
    assert torch.equal(found.rollout, ROLLOUT)
    assert torch.equal(found.recomputed, TRAINED)
    assert found.sequences == (3, 2)
    assert read_rollout(written(name, tmp_path), name).format == name


def test_routes_layers_and_versions_are_read(tmp_path: Path) -> None:
    routes = torch.arange(2 * 8 * 3 * 2).view(2, 8, 3, 2) % 4
    more = {"routed_experts": routes, "rollout/layers.0": torch.full((2, 8, 4), 3.0)}
    more |= {"recomputed/layers.0": torch.full((2, 8, 4), 2.0), "trainer_version": torch.tensor([4, 4])}
    torch.save(_verl() | more, tmp_path / "a.pt")
    found = read_rollout(tmp_path / "a.pt")
    assert found.routes is not None
    assert torch.equal(found.routes[1], routes[1, 1:6])
    assert found.layers == {"layers.0": pytest.approx(0.5)}
    assert found.versions == {"trainer_version": (4, 4)}


def test_rows_that_fill_up_a_batch_are_left_out(tmp_path: Path) -> None:
    filled = {name: torch.cat((one, torch.zeros_like(one[:1]))) for name, one in _verl().items()}
    torch.save({**filled, "trainer_version": torch.tensor([[4], [4], [0]])}, tmp_path / "a.pt")
    found = read_rollout(tmp_path / "a.pt")
    assert (found.sequences, found.versions["trainer_version"]) == ((3, 2), (4, 4))
    assert torch.equal(found.rollout, ROLLOUT)
    assert [len(ids) for ids, *_ in batches(found, {"vocab_size": 100})] == [2]
    torch.save({**_verl(), "trainer_version": torch.tensor([[4]])}, tmp_path / "c.pt")
    with pytest.raises(UntrustedError, match="trainer_version has 1 sequences"):
        read_rollout(tmp_path / "c.pt")
    torch.save({**filled, "attention_mask": torch.zeros(3, 8)}, tmp_path / "b.pt")
    with pytest.raises(UntrustedError, match="all of its tokens are padding"):
        read_rollout(tmp_path / "b.pt")


def _change(**changed: Any) -> dict[str, Any]:
    made = {**_verl(), **changed}
    return {name: one for name, one in made.items() if one is not None}


_REFUSED: dict[str, tuple[Any, str]] = {
    "cut": (_change(rollout_log_probs=torch.zeros(2, 3)), "has 3 entries in sequence 0, and responses has 4 tokens"),
    "nan": (_change(old_log_probs=padded(TRAINED * torch.nan)), "5 of 5 log-probabilities of the recomputed side"),
    "inf": (_change(rollout_log_probs=padded(ROLLOUT / 0)), "are not finite, the first in sequence 0"),
    "positive": (_change(rollout_log_probs=padded(-ROLLOUT)), "above 0"),
    "empty": (_change(response_mask=torch.zeros(2, 4)), "no token is compared"),
    "field": (_change(old_log_probs=None), "a dump needs those of one of plain: token_ids"),
    "mask": (_change(attention_mask=None), "lacks attention_mask, which verl has"),
    "batch": (_change(rollout_log_probs=padded(ROLLOUT)[:1]), "has 1 sequences"),
    "halves": (_change(responses=IDS[:, 4:] + 0.5), "no whole ones"),
    "tokens": (_change(responses=IDS[:, 4:] - 20), "has the token -"),
    "dimensions": (_change(response_mask=torch.ones(2, 4, 2)), "response_mask has 2 dimensions in sequence 0"),
    "versions": (_change(trainer_version=torch.ones(2, 2)), "trainer_version has 2 numbers for a sequence"),
    "side": (_change(**{"rollout/x": torch.ones(2, 2)}), "no recomputed/x"),
}


@sweep(name=_REFUSED)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    contents, said = _REFUSED[name]
    torch.save(contents, tmp_path / "a.pt")
    with pytest.raises(UntrustedError, match=said):
        read_rollout(tmp_path / "a.pt")


class _Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("exploded"),))


def test_pickles_and_unknown_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(_Bomb()))
    torch.save(_Bomb(), tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(b"PK nothing")
    (tmp_path / "d.safetensors").write_bytes(b"nothing")
    (tmp_path / "e.jsonl").write_text('{"token_ids": [1]}\n{"mask": [1]}\n')
    torch.save([torch.ones(1)], tmp_path / "f.pt")
    row = '{"token_ids": [5, 6], "mask": 1, "rollout_raw_logprob": 0, "prev_recompute_raw_logprob": 0, "rollout/a": '
    (tmp_path / "h.jsonl").write_text(f'{row}[1, 2], "recomputed/a": 1}}\n{row}1, "recomputed/a": 1}}\n')
    (tmp_path / "g.jsonl").write_text("5\n")
    words = {
        "a.pkl": "A pickle could run code",
        "b.pt": "nothing else is unpickled",
        "c.pt": "nothing else is unpickled",
    }
    words |= {"d.safetensors": "no safetensors file", "e.jsonl": "some rows lack mask and token_ids"}
    words |= {"f.pt": "needs a dict of tensors", "g.jsonl": "needs a row of JSON", "none.pt": "none.pt"}
    words |= {"h.jsonl": r"a is \(2,\) and \(\) in the rollout, and \(\) and \(\) in training"}
    for name, said in words.items():
        with pytest.raises(UntrustedError, match=said):
            read_rollout(tmp_path / name)
    assert not Path("exploded").exists()
    with pytest.raises(UntrustedError, match="is none of plain, nemo-rl"):
        read_rollout(written("verl", tmp_path), "areal")


def _three(first: Tensor, *others: Tensor, **more: Any) -> Rollout:
    recomputed, trained = (*others, None)[:2] if len(others) < 2 else others
    assert recomputed is not None
    return Rollout("plain", (torch.arange(6),), (torch.arange(1, 6),), first, recomputed, trained, **more)


def test_the_certificate_is_of_bits() -> None:
    same = certify(_three(ROLLOUT, ROLLOUT.clone(), ROLLOUT.clone()))
    assert (same.equal, same.mismatch_count, same.why) == (True, 0, "")
    assert len(set(same.sha256.values())) == 1
    near = ROLLOUT.clone()
    near[2] = torch.nextafter(near[2], torch.tensor(0.0))
    apart = certify(_three(ROLLOUT, ROLLOUT.clone(), near))
    assert (apart.equal, apart.mismatch_count) == (False, 1)
    assert apart.mismatches == {"rollout, recomputed": 0, "rollout, trained": 1, "recomputed, trained": 1}
    assert json.loads(apart.to_json())["mismatch_count"] == 1
    signs = certify(_three(torch.zeros(5), -torch.zeros(5), torch.zeros(5)))
    assert signs.mismatch_count == 5  # bits, not numbers
    assert "lacks the first training forward" in certify(_three(ROLLOUT, ROLLOUT)).why
    assert "it was skipped" in certify(_three(ROLLOUT, torch.zeros(5), ROLLOUT)).why
    versions = {"rollout_start_version": (3,), "trainer_version": (4,)}
    assert "different versions" in certify(_three(ROLLOUT, ROLLOUT, ROLLOUT, versions=versions)).why
